"""Routing of tokens to experts, and sorting rows by expert."""

from __future__ import annotations

import math

import numpy as np

from tgi_trio.shard.cpu_backend.kernels import kernel
from tgi_trio.shard.cpu_backend.kernels.activation import sigmoid_times
from tgi_trio.shard.cpu_backend.kernels.arrays import floats_at, greater, ints_at
from tgi_trio.shard.cpu_backend.kernels.mixture.member_runs import list_runs, note_adapter
from tgi_trio.shard.cpu_backend.kernels.vectors import (
    add,
    copy_word,
    divide,
    fill,
    first_lanes,
    largest,
    load,
    load_int,
    maximum,
    store,
    store_float,
    store_int,
    subtract,
    total,
    weight,
)
from tgi_trio.shard.cpu_backend.kinds.kind import BLOCK_INPUTS
from tgi_trio.shard.cpu_backend.tables import Buffer, Routing
from tgi_trio.shard.cpu_backend.weight_layout import LANES

ROUTED, CHOSEN, PARTS, GROUPS, MEMBERS = (
    int(b) for b in (Buffer.ROUTED, Buffer.CHOSEN, Buffer.PARTS, Buffer.GROUPS, Buffer.MEMBERS)
)
BRANCH = int(Buffer.BRANCH)
SPARSE_MIXER, GROUPED_SOFTMAX, GROUPED_SIGMOID = (
    int(r) for r in (Routing.SPARSE_MIXER, Routing.GROUPED_SOFTMAX, Routing.GROUPED_SIGMOID)
)
SIGMOID = int(Routing.SIGMOID)
_NOTHING = -1e30  # the score of no expert
_TINY = 1e-20  # the probabilities of all chosen experts may be zero (DeepSeek-V3)
_LINE = 64


@kernel
def route(rank, step, op, mixture, scratch):
    """Choose the experts of this thread's tokens: CHOSEN and PARTS, as torch's `route` does.

    `scratch`: room for three numbers of each expert.
    """
    room = (mixture.count + LANES - 1) // LANES * LANES
    for t in range(rank, step.tokens, step.threads):
        logits = step.buffers[ROUTED] + t * op.width * 4
        chosen = step.buffers[CHOSEN] + t * mixture.per_token * 4
        parts = step.buffers[PARTS] + t * mixture.per_token * 4
        if mixture.routing == SPARSE_MIXER:
            mix_sparsely(mixture, logits, scratch, chosen, parts)
        else:
            odds, scores = scratch, scratch + 4 * room
            find_odds(mixture, logits, odds)
            for i in range(0, room, LANES):
                value = load((logits if mixture.routing == SIGMOID else odds) + 4 * i)
                if mixture.choice_bias:
                    value = add(value, load(mixture.choice_bias + 4 * i))
                store(scores + 4 * i, value)
            if mixture.groups > 1:
                bar_groups(mixture, scores, scratch + 8 * room)
            choose_best(mixture, odds, scores, chosen, parts)
        scale_parts(mixture, chosen, parts)


@kernel
def scale_parts(mixture, chosen, parts):
    """Multiply the weights of a token's experts by the experts' scales."""
    if mixture.expert_scale:
        scales = floats_at(mixture.expert_scale, mixture.count)
        own = floats_at(parts, mixture.per_token)
        for j in range(mixture.per_token):
            own[j] *= scales[load_int(chosen + 4 * j)]


@kernel
def find_odds(mixture, logits, odds):
    """Write the probability of each expert by softmax, or by an independent sigmoid."""
    count = mixture.count
    alone = mixture.routing == GROUPED_SIGMOID or mixture.routing == SIGMOID
    best = fill(_NOTHING)
    for i in range(0, count, LANES):
        best = maximum(first_lanes(count - i, load(logits + 4 * i), fill(_NOTHING)), best)
    best, sums = fill(largest(best)), fill(0.0)
    for i in range(0, count, LANES):
        value = load(logits + 4 * i)
        if alone:
            value = sigmoid_times(fill(1.0), value)
        else:
            value = first_lanes(count - i, weight(subtract(value, best)), fill(0.0))
            sums = add(sums, value)
        store(odds + 4 * i, value)
    if not alone:
        whole = fill(total(sums))
        for i in range(0, count, LANES):
            store(odds + 4 * i, divide(load(odds + 4 * i), whole))


@kernel
def bar_groups(mixture, scores, room):
    """Exclude the experts of all groups but the best.

    A group's score is that of its best expert; with sigmoids, the sum of its two best.
    """
    each = mixture.count // mixture.groups
    given, values = floats_at(scores, mixture.count), floats_at(room, mixture.groups)
    other = np.float32(_NOTHING)
    if mixture.routing == GROUPED_SOFTMAX:
        other = np.float32(0.0)
    for group in range(mixture.groups):
        first, second = np.float32(_NOTHING), np.float32(_NOTHING)
        for i in range(group * each, (group + 1) * each):
            if given[i] > first:
                first, second = given[i], first
            else:
                second = greater(second, given[i])
        values[group] = first
        if mixture.routing == GROUPED_SIGMOID:
            values[group] = first + second
    for _ in range(mixture.groups_used):
        best = place_of_largest(values, mixture.groups)
        values[best] = np.float32(2 * _NOTHING)  # used
    for group in range(mixture.groups):
        if not values[group] < np.float32(1.5 * _NOTHING):
            for i in range(group * each, (group + 1) * each):
                given[i] = other


@kernel
def place_of_largest(values, count):
    """Return the first index of the largest number; 0 if all are NaN."""
    best = np.int64(0)
    for i in range(1, count):
        if values[i] > values[best]:
            best = i
    return best


@kernel
def choose_best(mixture, odds_at, scores_at, chosen, parts):
    """Write the experts with the largest scores, with their probabilities as weights."""
    odds, scores = floats_at(odds_at, mixture.count), floats_at(scores_at, mixture.count)
    sum_ = np.float32(0.0)
    for j in range(mixture.per_token):
        best = place_of_largest(scores, mixture.count)
        scores[best] = np.float32(2 * _NOTHING)
        store_int(chosen + 4 * j, best)
        store_float(parts + 4 * j, odds[best])
        sum_ += odds[best]
    factor = mixture.scale
    if mixture.normalise:
        factor = mixture.scale / (sum_ + np.float32(_TINY))
    own = floats_at(parts, mixture.per_token)
    for j in range(mixture.per_token):
        own[j] *= factor


@kernel
def mix_sparsely(mixture, logits_at, room, chosen, parts):
    """Choose experts one after the other (SparseMixer).

    The weight of each is its softmax over those remaining experts that are within the jitter of it.
    """
    logits, left = floats_at(logits_at, mixture.count), floats_at(room, mixture.count)
    for i in range(mixture.count):
        left[i] = logits[i]
    for j in range(mixture.per_token):
        index = place_of_largest(left, mixture.count)
        best, sum_ = left[index], 0.0
        for i in range(mixture.count):
            size = greater(abs(logits[i]), best)
            if not (best - logits[i]) / size > 2 * mixture.jitter:
                sum_ += math.exp(left[i] - best)
        store_int(chosen + 4 * j, index)
        store_float(parts + 4 * j, np.float32(1.0 / sum_))
        left[index] = np.float32(_NOTHING)


@kernel
def arrange(variant, rank, step, op, mixture, scratch):
    """Copy activations into rows sorted by expert: GROUPS, MEMBERS, ARRANGED.

    Every thread counts for itself, which takes less time than waiting for one that does, and copies
    its share. `scratch`: room for an int64 of each expert. A branch that experts are to add to is
    zeroed. If adapters change the experts, the runs of their rows are listed.
    """
    count, rows = mixture.count, step.tokens * mixture.per_token
    chosen, groups = step.buffers[CHOSEN], step.buffers[GROUPS]
    places = ints_at(scratch, count)
    for expert in range(count):
        places[expert] = 0
    for i in range(rows):
        places[load_int(chosen + 4 * i)] += 1
    first, used = np.int64(0), np.int64(0)
    for expert in range(count):
        own = places[expert]
        places[expert] = first
        if own:
            used += 1
            if rank == 0:
                store_int(groups + 12 * used, expert)
                store_int(groups + 12 * used + 4, first)
                store_int(groups + 12 * used + 8, first + own)
        first += own
    if rank == 0:
        store_int(groups, used)
    size = op.inputs * variant.active_bytes
    if op.multiply:
        size = op.inputs // BLOCK_INPUTS * op.active_bytes + op.facts_bytes
    source, target = step.buffers[op.source], step.buffers[op.target]
    for i in range(rows):
        expert = load_int(chosen + 4 * i)
        place = places[expert]
        places[expert] = place + 1
        if place % step.threads == rank:
            store_int(step.buffers[MEMBERS] + 4 * place, i)
            copy_row(target + place * size, source + i // mixture.per_token * size, size)
        if op.by_member and rank == 0:
            note_adapter(step, rows, place, i // mixture.per_token)
    if op.by_member and rank == 0:
        list_runs(step, rows)
    if op.epilogue:
        for t in range(rank, step.tokens, step.threads):
            for i in range(0, 4 * op.inputs, _LINE):
                store(step.buffers[BRANCH] + t * op.inputs * 4 + i, fill(0.0))


@kernel
def copy_row(target, source, size):
    """Copy `size` bytes, a multiple of 4."""
    whole = size // _LINE * _LINE
    for i in range(0, whole, _LINE):
        store(target + i, load(source + i))
    for i in range(whole, size, 4):
        copy_word(target + i, source + i)
