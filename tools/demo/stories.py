"""Write short stories and descriptions from templates, as ordinary prose for the model to read."""

from __future__ import annotations

import random

Words = dict[str, list[str]]

_OPENINGS = (
    "Once upon a time a {quality} {animal} lived in a {place}.",
    "Once upon a time there was a {job} who had a {quality} {thing}.",
    "The old {job} of the {place} had a {quality} {animal}.",
    "There was once a {quality} {animal} who lived near a {place}.",
    "In a {quality} {place} lived a {job} named {name}.",
    "{weather} when {name} came to the {place}.",
    "Every {season}, a {quality} {job} came to the {place}.",
    "{name} and {other} were friends, and they lived in the same {place}.",
    "One day in {season}, {name} found a {quality} {thing} near the {place}.",
    "Long ago, a {job} kept a {thing} that nobody was allowed to touch.",
    "{name} was a {job}, and a {quality} one.",
)
_MIDDLES = (
    "{weather}, and nobody else was on the road.",
    "In the {thing} there was a note, but the words were hard to read.",
    "A {quality} {animal} sat by the gate and watched everything.",
    '"Have you seen my {thing}?" asked {name}.',
    '"It must be in the {place2}," said {other}, "because I saw it there in the morning."',
    "{name} looked for it in the house, in the garden and behind the door.",
    "They walked to the {place2} together and talked about old times.",
    "The {job2} gave them bread and a cup of tea.",
    "Nobody in the {place} believed the story at first.",
    "The {animal} had carried the {thing} away and hidden it under a tree.",
    "For three days nothing happened.",
    "{other} had an idea and began to laugh.",
    "The {job2} shook his head, but he said nothing.",
    "It was harder than it looked, and it took the whole afternoon.",
    "They tried it once, they tried it twice, and the third time it worked.",
    "On the way back they met a {quality2} {animal2}, and it followed them home.",
    '"We should ask the {job2}," said {name}.',
    "They waited a little, because waiting costs nothing.",
    "The {place2} was far away, and the way led over a hill.",
    "In {season} the days were long, and there was time for everything.",
)
_ENDINGS = (
    "In the evening they sat together and told the story again.",
    "From that day on, the {thing} stood in the window, where everybody could see it.",
    "And that was the end of it, or so they thought.",
    "{name} smiled and went home.",
    "Since then the {animal} has had a place by the stove.",
    "They never spoke about it again, but they never forgot it.",
    "The {job2} still tells this story when the evenings are long.",
    "So everything was in its place again, and the {place} was quiet.",
    "It was a good day, and good days should be remembered.",
)


def write_story(words: Words, rng: random.Random) -> str:
    """Write one story of four to nine sentences."""

    def pick(name: str) -> str:
        return rng.choice(words[name])

    people = rng.sample(words["names"], 2)
    places = rng.sample(words["places"], 2)
    slots = {
        "name": people[0],
        "other": people[1],
        "place": places[0],
        "place2": places[1],
        "animal": pick("animals"),
        "animal2": pick("animals"),
        "job": pick("jobs"),
        "job2": pick("jobs"),
        "thing": pick("things"),
        "quality": pick("qualities"),
        "quality2": pick("qualities"),
        "weather": pick("weather"),
        "season": pick("seasons"),
    }
    sentences = [rng.choice(_OPENINGS), *rng.sample(_MIDDLES, rng.randint(2, 7))]
    sentences.append(rng.choice(_ENDINGS))
    text = " ".join(sentence.format(**slots) for sentence in sentences)
    return text.replace(" a old ", " an old ").replace("A old ", "An old ")
