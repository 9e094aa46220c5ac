"""The tables that Python fills and the kernels read: a model's operations, and a step's inputs.

Addresses are int64; sizes are in elements unless they say bytes.
"""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np


@unique
class Code(IntEnum):
    """What an operation does."""

    EMBED = 0  # hidden states of the tokens
    NORM = 1
    LINEAR = 2
    ROTATE = 3  # head norms, rotary positions; writes K and V to the cache
    ATTEND = 4
    QUANTISE = 5  # rounds activations to integers
    SHRINK = 6  # multiplies a linear's activations by the first matrix of each row's adapter
    # Of mixtures of experts, see `kernels/mixture/`:
    ROUTE = 7  # chooses each token's experts and their weights
    ARRANGE = 8  # copies activations into rows by expert
    EXPERTS = 9  # a linear of every expert that has rows
    JOIN = 10  # adds the shared expert, scaled by its router
    # Of few families, see `kernels/rare.py`:
    PLACE = 11  # adds learned positions to the embeddings
    NORM_ROWS = 12  # norms a part of every row of a buffer, in place
    PASS_ON = 13  # hands a part of a row unchanged to products that have no norm before them
    REORDER = 14  # reorders queries and keys, so that rotary pairs are half a head apart
    OPEN = 15  # multiplies a result by its gate, with a norm of groups if there is one
    SCALE = 22  # multiplies hidden states by a number
    TELL = 23  # layers' own embeddings: norms a projection, and adds the token's row of a table
    CUT = 24  # activates gates, as far as they are above a bound
    # Of several hidden states of a token, see `kernels/streams.py`:
    SPLIT = 25  # scales the projected ones to the magnitude of the first
    PREDICT = 26  # predicts all of them after a layer
    CORRECT = 27  # corrects all of them by the one that was computed
    SPREAD = 28  # adds a branch to all but the first
    MERGE = 29  # their mean, after scaling all to the magnitude of the first
    # Of heads that fill no panels, see `kernels/padding.py`:
    PAD = 30  # pads the heads of queries, keys and values with zeros
    CLOSE = 31  # removes the padding from the output of attention
    # Of what keeps a state per sequence, see `kernels/states/`:
    CONVOLVE = 16  # a causal convolution per channel
    RECUR = 17  # a matrix per head, which every token updates and reads: delta rules, Mamba-2
    SCAN = 32  # Mamba's scan: several numbers per channel, each with a decay of its own
    BLEND = 33  # RG-LRU's recurrence: one number per channel
    # Of latents, see `kernels/latents.py`:
    COMPRESS = 18  # norms compressed queries
    TURN = 19  # splits queries, rotates their positional parts, writes latents to the cache
    ABSORB = 20  # multiplies queries by the matrix that would expand latents to keys
    EXPAND = 21  # multiplies what was read of latents by the matrix that makes values


MIXING = (Code.ROUTE, Code.ARRANGE, Code.EXPERTS, Code.JOIN)
RARE = (
    *(Code.PLACE, Code.NORM_ROWS, Code.PASS_ON, Code.REORDER, Code.OPEN),
    *(Code.SCALE, Code.TELL, Code.CUT),
)
KEEPING = (Code.CONVOLVE, Code.RECUR, Code.SCAN, Code.BLEND)
STREAMING = (Code.SPLIT, Code.PREDICT, Code.CORRECT, Code.SPREAD, Code.MERGE)
OF_PADDING = (Code.PAD, Code.CLOSE)
OF_LATENTS = (Code.COMPRESS, Code.TURN, Code.ABSORB, Code.EXPAND)


class Epilogue(IntEnum):
    """What becomes of a result."""

    STORE = 0  # float32, scaled, soft-capped and cut
    ADD = 1  # to float32 that is there, scaled
    ACTIVATE = 2  # through the activation function, as activations of the next product
    GATE = 3  # activation(first half of the panel) * second half
    PASS = 4  # as activations of the next product


class Activation(IntEnum):
    """Activation functions; their names in config.json are in `ACTIVATIONS`."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3
    QUICK_GELU = 4
    RELU2 = 5  # squared
    XIELU = 6  # with numbers of its own, see `learned`
    SIGMOID = 7  # of gates


ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_bloom": Activation.GELU_TANH,  # which writes a constant with fewer digits
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "xielu": Activation.XIELU,
}


@unique
class Buffer(IntEnum):
    """Where operations leave their results for the next: one row per token of the step."""

    HIDDEN = 0  # float32 [T, hidden]: the residual stream
    NORMED = 1  # activations [T, hidden]
    QKV = 2  # float32 [T, queries, keys, values of all heads], and gates behind if there are any
    QUERY = 3  # activations [T, heads * head_dim], rotated and scaled
    ATTENDED = 4  # activations [T, heads * value_dim]
    INNER = 5  # activations [T, mlp_width]
    BRANCH = 6  # float32 [T, hidden]: a branch that is normed before it joins the residual stream
    LOGITS = 7  # float32 [wanted rows, padded vocabulary]
    WHOLE_8 = 8  # activations as whole numbers, see `kernels/quantised/activations.py`
    WHOLE_16 = 9
    LONE = 10  # rows given from outside: activations, or float32 that become whole numbers
    PRODUCT = 11  # float32: what a lone linear layer makes of them
    LOW = 12  # activations [T, ranks of a layer's adapters]
    ACTIVE = 13  # activations [T, widest]: what QUANTISE reads, for SHRINK
    FLOATS = 14  # activations [T, widest] for weights that are no whole numbers: float32, bfloat16
    UNSORTED = 15  # float32 [T, widest]: what a norm leaves for QUANTISE to bring into an order
    # Of mixtures; each token has a row for each expert that it goes to:
    ROUTED = 16  # float32 [T, padded experts]: what the router says, of streams as well
    CHOSEN = 17  # int32 [T, per_token]: experts
    PARTS = 18  # float32 [T, per_token]: how much of each
    GROUPS = 19  # int32 [1 + experts, 3]: how many experts have rows; each, its first row, its end
    MEMBERS = 20  # int32 [rows]: of a row by expert, its place in CHOSEN
    ARRANGED = 21  # activations [rows, hidden]
    OPENED = 22  # float32 [T, 32]: what the router of the shared expert says
    SHARED = 23  # float32 [T, hidden]: what the shared expert does
    # Of what keeps a state:
    # float32 [T, all that a mixer projects], or what queries and latents are made of
    PROJECTED = 24
    # Activations [T, width]: what a mixer says, or attention through its gates; with latents what
    # queries are compressed to, then their parts that do not turn, then values.
    MIXED = 25
    # Float32: what each channel of a key forgets [T, heads * key_dim]; of SCAN steps of time, then
    # what they are made of, b and c; of BLEND per head what opens for what enters, what decays.
    DECAYS = 26
    OWN = 27  # float32 [T, layers * width]: layers' own embeddings
    DENSE = 28  # float32 [T, hidden]: what an MLP says that has experts beside it
    STREAMS = 29  # float32 [T, count * hidden]: all hidden states, where a token has several


class Routing(IntEnum):
    """How a token chooses its experts; the words of `ExpertsSpec.routing` are in `ROUTINGS`."""

    SOFTMAX = 0
    SPARSE_MIXER = 1
    GROUPED_SOFTMAX = 2
    GROUPED_SIGMOID = 3
    SIGMOID = 4


ROUTINGS = {
    "softmax": Routing.SOFTMAX,
    "biased-softmax": Routing.SOFTMAX,  # `choice_bias` is there or not
    "sparse-mixer": Routing.SPARSE_MIXER,
    "grouped-softmax": Routing.GROUPED_SOFTMAX,
    "grouped-sigmoid": Routing.GROUPED_SIGMOID,
    "sigmoid": Routing.SIGMOID,
}


class GroupNorm(IntEnum):
    """Whether OPEN has a norm; the words of `Mamba2.norm` are in `GROUP_NORMS`."""

    NONE = 0
    BEFORE = 1  # the gate
    BEHIND = 2


GROUP_NORMS = {
    "none": GroupNorm.NONE,
    "before gate": GroupNorm.BEFORE,
    "behind gate": GroupNorm.BEHIND,
}


class Form(IntEnum):
    """In which forms an operation's results are wanted by those that multiply them, as bits."""

    PLAIN = 1  # as the step's variant has activations
    WHOLE_8 = 2
    WHOLE_16 = 4
    WIDE = 8  # float32, for QUANTISE to read: in its target, and a norm's in UNSORTED
    FLOATS = 16
    PAIRS = 32  # bfloat16, in the buffer FLOATS


OPERATION = np.dtype(
    [
        ("code", "i8"),
        ("source", "i8"),  # Buffer
        ("target", "i8"),  # Buffer
        ("epilogue", "i8"),
        ("activation", "i8"),
        ("wanted_only", "i8"),  # 1: only for the tokens whose logits are wanted
        ("weights", "i8"),  # embedding rows, norm weights (0: none) or packed panels
        ("scales", "i8"),  # of int8 weights, float32 [outputs]; 0: none
        ("bias", "i8"),  # 0: none
        ("inputs", "i8"),  # features of a source row
        ("outputs", "i8"),  # features of a linear, padded to whole panels
        ("width", "i8"),  # features of a target row
        ("offset", "i8"),  # of a linear's first feature in a target row
        ("forms", "i8"),  # bits of Form
        ("multiply", "i8"),  # `multiply_panel` of quantised weights; 0: the step's own
        ("active_bytes", "i8"),  # of a block of whole activations
        ("panel_bytes", "i8"),  # of quantised weights
        # int32 [inputs], of QUANTISE the feature that each is, -1: 0; of REORDER [head_dim];
        # 0: as they are
        # of TURN [rotated], of PAD [head_dim]
        ("order", "i8"),
        ("span_blocks", "i8"),
        ("expand", "i8"),  # `expand` (of SHRINK: `shrink`) of adapters; 0: the step has none
        ("site", "i8"),  # a linear's number among those that adapters change
        ("room_bytes", "i8"),  # an unpacked block's
        ("parts", "i8"),  # scales of an unpacked block, for EMBED
        ("lows", "i8"),  # lows of an unpacked block
        ("zero", "i8"),  # its code of 0
        ("centred", "i8"),  # 1: LayerNorm, 0: RMSNorm
        ("keys", "i8"),  # the layer's K and V
        ("values", "i8"),
        ("kv_heads", "i8"),
        ("head_dim", "i8"),  # of a query and a key
        ("value_dim", "i8"),
        ("reads_only", "i8"),  # 1: there are queries alone, K and V are another layer's
        ("keys_as_values", "i8"),  # 1: values are what keys are before they are normed and turned
        ("value_norm", "i8"),  # 1: values are normed, without weights
        ("causal", "i8"),  # 1: `lasts` is not looked at
        ("window", "i8"),  # 0: none
        ("chunk", "i8"),  # positions from one multiple of it to the next see each other; 0: all
        ("cosines", "i8"),  # float32 [positions, rotated / 2]; 0: no rotary positions
        ("sines", "i8"),
        ("rotated", "i8"),  # leading dimensions of a head that turn
        ("axes", "i8"),  # int32 [rotated / 2]: with which position of three; 0: with the first
        ("query_norm", "i8"),  # float32 [head_dim]; 0: none
        ("key_norm", "i8"),
        ("norm_last", "i8"),  # 1: heads are turned, then normed
        ("query_scales", "i8"),  # float32 [positions]: of queries there; 0: none
        ("learned", "i8"),  # float32 [4]: of x * x, of what is below 0, of x, and the bound of e^x
        ("slopes", "i8"),  # float32 [heads]: of linear biases; 0: none
        ("sinks", "i8"),  # float32 [heads]: scores of nothing; 0: none
        ("eps", "f4"),
        ("scale", "f4"),
        ("cap", "f4"),  # 0: none
        ("key_scale", "f4"),  # of K and V of 8 bits: what 1 stands for
        ("value_scale", "f4"),
        ("value_factor", "f4"),  # of values as they are projected
        ("clip", "f4"),  # results are cut there on both sides; 0: none
        ("spare", "f4"),
        ("kernel", "i8"),  # of an operation that is compiled apart, see `kernels/apart.py`; 0: none
        # What it needs to know beside: MIXTURE, MIXER, OPENING, LATENT, OWN, PADDING or STREAM
        ("facts", "i8"),
        # Features in a source row: of a head, of ABSORB and EXPAND; of PASS_ON all of them, as of a
        # linear that reads a part; 0: `inputs`
        ("span", "i8"),
        ("begin", "i8"),  # of a linear's first input in a source row
        ("states", "i8"),  # slots, of `state_bytes` each
        ("state_bytes", "i8"),
    ]
)

MIXTURE = np.dtype(
    [
        ("count", "i8"),  # experts
        ("per_token", "i8"),
        ("routing", "i8"),  # Routing
        ("normalise", "i8"),  # 1: parts of the chosen experts sum to one
        ("groups", "i8"),
        ("groups_used", "i8"),
        ("choice_bias", "i8"),  # float32 [count]; 0: none
        ("expert_scale", "i8"),  # float32 [count]: of each expert's part; 0: none
        ("weighs_inputs", "i8"),  # 1: parts multiply what experts read, not what they say
        ("paired", "i8"),  # 1: rows of gate and up take turns, not 16 of each
        ("jitter", "f4"),
        ("scale", "f4"),  # of the parts
        ("limit", "f4"),  # of what the gate is and is for; 0: none
        ("spare", "f4"),
    ]
)

# What keeps a state. Of CONVOLVE the first lines, of RECUR the others; the places are features of
# a row of PROJECTED. What SCAN and BLEND read is said behind.
MIXER = np.dtype(
    [
        ("channels", "i8"),
        ("taps", "i8"),
        ("kernel", "i8"),  # float32 [channels / 16, taps, 16], the weight of the token itself last
        ("bias", "i8"),  # float32 [channels]; 0: none
        ("first", "i8"),  # place of the first channel
        ("gated", "i8"),  # 1: channels of b, of c, of x, see `ShortConvolution`; 0: SiLU behind
        ("bare", "i8"),  # 1: nothing is behind
        ("heads", "i8"),
        ("sharing", "i8"),  # neighbours that have a query and a key together
        ("key_heads", "i8"),  # queries and keys, which begin again behind the last
        ("key_dim", "i8"),
        ("value_dim", "i8"),
        ("query", "i8"),  # place of the first head's
        ("key", "i8"),
        ("value", "i8"),
        ("beta", "i8"),
        ("decay", "i8"),
        ("rate", "i8"),  # float32 [heads], negative: of what is forgotten
        ("decay_bias", "i8"),  # float32 [heads]; by channel [heads, key_dim]
        ("by_channel", "i8"),  # 1: what is forgotten is in DECAYS, not at `decay`
        ("skip", "i8"),  # float32 [heads]: how much of a value is said at once; 0: none
        ("corrects", "i8"),  # 1: a delta rule, 0: Mamba-2
        # Of SCAN `channels` from place 0 on, with `key_dim` numbers each; key and query are places
        # of b and c in a row of DECAYS; `rate` float32 [channels / 16, key_dim, 16], `decay_bias`
        # and `skip` [channels]. Of BLEND `channels` from `first` on, and `rate` [channels].
        ("gate", "i8"),  # place of the first channel's
        ("decays_width", "i8"),  # features of a row of DECAYS
        ("head_dim", "i8"),  # of BLEND: channels whose gates lie together
        ("beta_scale", "f4"),
        ("least_step", "f4"),  # of time
        ("most_step", "f4"),
        ("spare", "f4"),
    ]
)

LATENT = np.dtype(
    [
        ("rank", "i8"),
        ("plain_dim", "i8"),  # of a query, what does not turn, and what does
        ("rotary_dim", "i8"),
        ("query_width", "i8"),  # features of a row of queries
        ("place", "i8"),  # of the latent in a row of PROJECTED, with the turned key behind
    ]
)

# Of PAD and CLOSE.
PADDING = np.dtype(
    [
        ("dim", "i8"),  # of a query or key, without zeros
        ("value_dim", "i8"),
        ("queries", "i8"),  # of a row, with the keys
        ("values", "i8"),
    ]
)

OPENING = np.dtype(
    [
        ("gates", "i8"),  # Buffer, float32
        ("gate_width", "i8"),  # features of its row
        ("gate_place", "i8"),  # of the first gate
        ("gate_size", "i8"),  # features that share one
        ("group", "i8"),  # features that are normed together
        ("norm", "i8"),  # GroupNorm
        ("activation", "i8"),  # of gates
    ]
)

# Of TELL.
OWN = np.dtype(
    [
        ("table", "i8"),  # [rows, width], in the model's dtype
        ("rows", "i8"),  # tokens beyond them have the first
    ]
)

# Of SPLIT and what follows it.
STREAM = np.dtype(
    [
        ("count", "i8"),
        ("active", "i8"),  # which one layers compute
        # float32 [count, count], of PREDICT [count * count, count]: of what a router says
        ("coefficients", "i8"),
        ("scale", "i8"),  # float32 [hidden]: of what CORRECT shows; 0: none
    ]
)

STEP = np.dtype(
    [
        ("threads", "i8"),
        ("tile", "i8"),  # tokens that attend one after the other, those of a sequence together
        ("first", "i8"),  # operations to run
        ("end", "i8"),
        ("tokens", "i8"),  # T
        ("wanted", "i8"),  # tokens whose logits are wanted
        ("wanted_ids", "i8"),  # int32 [wanted]: their places in the flat list
        ("token_ids", "i8"),  # int32 [T]
        ("positions", "i8"),  # int32 [T]
        ("lasts", "i8"),  # int32 [T]: the last position that each token sees
        ("turns", "i8"),  # int32 [T] rotary positions; of three axes, [3, T]
        ("turn_stride", "i8"),  # bytes from an axis to the next; 0: there is one
        ("slots", "i8"),  # int32 [T]
        ("tables", "i8"),  # int32 [R, table_width]
        ("table_width", "i8"),
        ("rows", "i8"),  # int32 [T]: row of each token
        ("runs", "i8"),  # int64 [run_count, 3], see `kernels/adapters.py`
        ("run_count", "i8"),
        ("run_of", "i8"),  # int32 [T]
        ("low_stride", "i8"),  # bytes of a row of LOW
        ("heads", "i8"),
        ("scores_bytes", "i8"),  # room for one head's scores
        ("scratch", "i8"),  # the threads' own memory
        ("scratch_bytes", "i8"),  # of each
        ("row_count", "i8"),  # R, where states are kept; each has its tokens and its slots
        ("row_starts", "i8"),  # int32 [R + 1]
        ("state_reads", "i8"),  # int32 [R]: slot of the state before; -1: it is zero
        ("state_writes", "i8"),  # int32 [R]: slot for the state behind
        ("arrived", "i8"),  # arrivals at barriers before this step
        ("buffers", "i8", (len(Buffer),)),
    ]
)

# A row whose next token is to be chosen: what to do with it, and what came of it.
ROW = np.dtype(
    [
        ("scores", "i8"),  # float32 [chunks * 128]; -inf: cannot be chosen
        ("chunks", "i8"),
        ("maxima", "i8"),  # float32 [chunks]: room for what is known of its chunks
        ("masses", "i8"),  # float32 [chunks]
        ("keys", "i8"),  # int64 [width or more]: candidates, see `kernels/sampling/candidates.py`
        # What to do, in this order; each is done where it is not 0.
        ("allowed", "i8"),  # mask all tokens whose bits here are 0, the lowest bit's first
        ("truncates", "i8"),  # mask what the truncations leave out, in place
        ("finds_best", "i8"),  # find the best score, and those of all chunks
        ("weighs", "i8"),  # 1: find the mass, 2: the entropy as well
        ("picks", "i8"),  # 1: choose the best token, 2: draw one
        ("width", "i8"),  # candidates to list
        ("top_k", "i8"),  # "off" as in SamplingParameters
        ("top_p", "f8"),
        ("typical_p", "f8"),
        ("uniform", "f8"),  # what to draw with, in [0, 1)
        ("best", "f4"),  # largest score; NaN where one of them is NaN
        ("sharpness", "f4"),  # 1 / temperature: scores count as (score - best) * sharpness
        ("floor", "f4"),  # least score after that; -inf: none
        # What came of it.
        ("mass", "f8"),  # sum of e^score
        ("entropy", "f8"),  # in nats
        ("token", "i8"),
        ("score", "f4"),  # of the token, relative and sharpened
    ]
)

# Records of adapters, in int64: of a run, of a site of an adapter, of a piece of its outputs.
RUN, SITE, PIECE = 3, 4, 7

# What becomes of a panel of quantised weights: it is multiplied as it is stored; it is unpacked
# first; it has been unpacked before; it is unpacked if the rows are many.
DIRECT, UNPACK, UNPACKED, UNPACK_FOR_MANY = 0, 1, 2, 3
