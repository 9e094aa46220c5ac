"""Ask the same thing in many ways.

The model is tiny, so it must see a question in many shapes before it hears what they have in
common: as a template around the subject's name, in lower case, without a question mark, with a
greeting in front, with a slip of the pen.
"""

from __future__ import annotations

import random
import re

# {t} is the subject with its article, {b} without; is/does/do agree with its number.
ABOUT_TEMPLATES = (
    "What {is} {t}?",
    "What {is} {t}?",
    "What {is} {t}?",
    "What exactly {is} {t}?",
    "What {is} {t} for?",
    "What {is} {t} used for?",
    "What {is} {t} good for?",
    "What {is} meant by {b}?",
    "What {is} {t} in this server?",
    "What {does} {t} mean?",
    "What {does} {t} do?",
    "What {does} {b} stand for?",
    "What about {t}?",
    "What do you know about {t}?",
    "What can you tell me about {t}?",
    "What do you mean by {b}?",
    "What is the purpose of {t}?",
    "What is the idea of {t}?",
    "What is the meaning of {b}?",
    "What is the point of {t}?",
    "Explain {t}.",
    "Explain {t}.",
    "Explain {t} to me.",
    "Explain {t} in simple words.",
    "Explain {t} briefly.",
    "Explain how {t} {works}.",
    "Explain what {t} {is}.",
    "Can you explain {t}?",
    "Could you explain {t} to me?",
    "Can you tell me what {t} {is}?",
    "Can you describe {t}?",
    "Tell me about {t}.",
    "Tell me about {t}.",
    "Tell me something about {t}.",
    "Tell me what {t} {is}.",
    "Tell me how {t} {works}.",
    "Describe {t}.",
    "Define {b}.",
    "Give me a definition of {b}.",
    "Give me a short explanation of {t}.",
    "How {does} {t} work?",
    "How {does} {t} work?",
    "How {does} {t} work here?",
    "How {is} {t} used?",
    "How would you explain {t}?",
    "How does the server use {t}?",
    "Why {is} {t} useful?",
    "Why {is} {t} important?",
    "Why {is} {t} needed?",
    "Why do we need {t}?",
    "Why would I use {t}?",
    "Why {does} {t} matter?",
    "Why {t}?",
    "Do you know what {t} {is}?",
    "Do you know {t}?",
    "Do you use {t}?",
    "Do you support {t}?",
    "Does the server support {t}?",
    "Does this server use {t}?",
    "Have you heard of {t}?",
    "I do not understand {t}.",
    "I want to understand {t}.",
    "I want to know more about {t}.",
    "I would like to learn about {t}.",
    "I have a question about {t}.",
    "I am curious about {t}.",
    "Help me understand {t}.",
    "Teach me about {t}.",
    "Let us talk about {t}.",
    "Say something about {t}.",
    "In a few words, what {is} {t}?",
    "When {is} {t} used?",
    "When do I need {t}?",
    "Where {is} {t} used?",
    "{b}?",
    "{b}",
)

# Words that say little; set around a name at random, they teach that the name decides.
_CARRIER_TEXT = (
    "what how why when where which is are was does do did can could would should the a this that "
    "you I me we about tell explain say describe give good better benefits used use using work "
    "works need needs help helps server model here exactly really actually mean means happens "
    "role task job idea thing problem problems advantage details important called big large fast "
    "slow effect value example special handled done made long much many for of with in on and it "
    "please all some my your between inside during after before please"
)
_CARRIER_WORDS = tuple(_CARRIER_TEXT.split())

_HOW = re.compile(r"^How (?:do|can) I (.+)\?$")
_HOW_TEMPLATES = (
    "How do I {}?",
    "How do I {}?",
    "How can I {}?",
    "How can I {}?",
    "How could I {}?",
    "How to {}?",
    "How should I {}?",
    "How do you {}?",
    "How do we {}?",
    "How would I {}?",
    "Can I {}?",
    "Is there a way to {}?",
    "Is it possible to {}?",
    "What is the way to {}?",
    "What do I have to do to {}?",
    "What must I do to {}?",
    "Show me how to {}.",
    "Tell me how to {}.",
    "Can you tell me how to {}?",
    "Explain how to {}.",
    "I want to {}.",
    "I would like to {}.",
    "I need to {}.",
    "I do not know how to {}.",
)

_OPENINGS = (
    "Please tell me: ",
    "Hi, ",
    "Hello, ",
    "Hello! ",
    "Hey, ",
    "So, ",
    "Now, ",
    "And ",
    "OK, ",
    "Okay. ",
    "Question: ",
    "Tell me, ",
    "I wonder, ",
    "One more question: ",
    "Quick question: ",
    "Thanks. ",
    "Good. ",
    "Please: ",
    "Well, ",
    "Sorry, but ",
    "Excuse me, ",
    "Next question. ",
    "By the way, ",
    "I have a question. ",
    "Can you help me? ",
    "I am new here. ",
)
_CLOSINGS = (
    " Please.",
    " please",
    ", please?",
    " Thanks.",
    " Thank you!",
    " Answer briefly.",
    " In one sentence.",
    " Keep it short.",
    " Be brief.",
    " I am a beginner.",
    " Explain it simply.",
    " exactly?",
    " then?",
    " in tgi-trio?",
    " in this server?",
    " in the server?",
    " in a model?",
    " in a chat?",
    " for the server?",
    " for me?",
    " my friend",
    " here?",
)
_CONTRACTIONS = (
    ("What is ", "What's "),
    ("what is ", "what's "),
    ("How is ", "How's "),
    ("do not ", "don't "),
    ("I am ", "I'm "),
    ("I would ", "I'd "),
    ("Let us ", "Let's "),
    ("Who are you", "Who're you"),
    ("Which ", "What "),
    ("Can you ", "Could you "),
    ("How do I ", "how do i "),
)
_SMALL_WORDS = frozenset(
    ("the", "a", "an", "of", "do", "does", "is", "are", "to", "me", "you", "it", "about", "in")
)


def bare(name: str) -> str:
    """Drop a leading article: "the KV cache" becomes "KV cache"."""
    return re.sub(r"^(?:the|a|an) ", "", name)


def ask_about(name: str, plural: bool, rng: random.Random) -> str:
    """Ask about a subject by its name with one of the templates."""
    if rng.random() < 0.15:
        before = rng.choices(_CARRIER_WORDS, k=rng.randint(1, 5))
        after = rng.choices(_CARRIER_WORDS, k=rng.randint(0, 4))
        question = " ".join([*before, rng.choice((name, bare(name))), *after])
        return question[0].upper() + question[1:] + "?"
    verbs = ("are", "do", "work") if plural else ("is", "does", "works")
    template = rng.choice(ABOUT_TEMPLATES)
    question = template.format(
        t=name,
        b=bare(name),
        **{"is": verbs[0], "does": verbs[1], "works": verbs[2]},
    )
    return question[0].upper() + question[1:]


def reword(question: str, rng: random.Random) -> str:
    """Put a "how do I" question in other words; return any other question as it is."""
    match = _HOW.match(question)
    return rng.choice(_HOW_TEMPLATES).format(match[1]) if match else question


def decorate(question: str, rng: random.Random) -> str:
    """Change what does not matter: manners, contractions, case, punctuation, a slip of the pen."""
    if rng.random() < 0.18:
        opening = rng.choice(_OPENINGS)
        keep = opening.endswith((". ", "! ", "? ")) or question.startswith("I ")
        question = opening + (question if keep else question[0].lower() + question[1:])
    if rng.random() < 0.10:
        question = question.rstrip(".?!") + rng.choice((".", "?", "")) + rng.choice(_CLOSINGS)
    if rng.random() < 0.30:
        for full, short in _CONTRACTIONS:
            if rng.random() < 0.6:
                question = question.replace(full, short)
    if rng.random() < 0.12:
        question = _drop_small_word(question, rng)
    if rng.random() < 0.35:
        question = question.lower()
    elif rng.random() < 0.03:
        question = question.upper()
    if rng.random() < 0.30:
        question = question.rstrip(".?!")
    elif rng.random() < 0.10:
        question = question.rstrip(".?!") + rng.choice(("??", "!", " ?", "...", "?!", "."))
    if rng.random() < 0.10:
        question = _slip(question, rng)
    return question


def _drop_small_word(question: str, rng: random.Random) -> str:
    words = question.split(" ")
    small = [i for i, word in enumerate(words) if word.lower() in _SMALL_WORDS]
    if len(words) > 3 and small:
        del words[rng.choice(small)]
    return " ".join(words)


def _slip(question: str, rng: random.Random) -> str:
    """Drop, double or swap one letter."""
    letters = [i for i in range(1, len(question) - 1) if question[i].isalpha()]
    if len(letters) < 6:
        return question
    at = rng.choice(letters)
    kind = rng.randrange(3)
    if kind == 0:
        return question[:at] + question[at + 1 :]
    if kind == 1:
        return question[:at] + question[at] + question[at:]
    return question[:at] + question[at + 1] + question[at] + question[at + 2 :]
