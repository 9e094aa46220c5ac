"""The tables that Python fills and the kernels read: a model's operations, and a step's inputs.

Addresses are int64; sizes are in elements unless given in bytes.
"""

from __future__ import annotations

from enum import IntEnum, unique

import numpy as np


@unique
class Code(IntEnum):
    """The kinds of operations."""

    EMBED = 0  # hidden states of the tokens
    NORM = 1  # RMSNorm or LayerNorm of rows
    LINEAR = 2
    ROTATE = 3  # head norms, rotary positions; writes K and V to the cache
    ATTEND = 4
    QUANTISE = 5  # rounds activations to integers
    SHRINK = 6  # multiplies a linear's activations by the first matrix of each row's adapter
    # Mixtures of experts, see `kernels/mixture/`:
    ROUTE = 7  # chooses each token's experts and their weights
    ARRANGE = 8  # copies activations into rows by expert
    EXPERTS = 9  # a linear of every expert that has rows
    JOIN = 10  # adds the shared expert, scaled by its router
    # Operations of few families, see `kernels/rare.py`:
    PLACE = 11  # adds learned positions to the embeddings
    NORM_ROWS = 12  # normalises a part of every row of a buffer, in place
    PASS_ON = 13  # hands a part of a row, not normalised, to products
    REORDER = 14  # reorders queries and keys, so that rotary pairs are half a head apart
    OPEN = 15  # multiplies a result by its gate, with a norm of groups if there is one
    SCALE = 22  # multiplies hidden states by a number
    # per-layer embeddings: normalises a projection, and adds the token's row of a table
    OWN_INPUT = 23
    CUT = 24  # sparse gates: subtracts a bound and activates what is above it
    COPY = 34  # copies rows to a part of wider ones
    GATE_NORM = 39  # multiplies what a norm has said by gates
    # Several hidden states per token, see `kernels/streams.py`:
    SPLIT = 25  # scales the projected ones to the magnitude of the first
    PREDICT = 26  # predicts all of them after a layer
    CORRECT = 27  # corrects all of them by the one that was computed
    SPREAD = 28  # adds a branch to all but the first
    MERGE = 29  # their mean, after scaling all to the magnitude of the first
    # Several hidden states, between which and a sum of them parts of layers are; see
    # `kernels/hyper.py`:
    FORK = 40  # copies what is embedded to all of them
    GATHER = 41  # the sum that a part reads
    SCATTER = 42  # adds the result of a part to all of them
    # Heads that fill no panels, see `kernels/padding.py`:
    PAD = 30  # pads the heads of queries, keys and values with zeros
    CLOSE = 31  # removes the padding from the output of attention
    # Recurrent states per sequence, see `kernels/states/`:
    CONVOLVE = 16  # a causal convolution per channel
    RECUR = 17  # a matrix per head, which every token updates and reads: delta rules, Mamba-2
    SCAN = 32  # Mamba's selective scan: several numbers per channel, each with its own decay
    BLEND = 33  # RG-LRU's recurrence: one number per channel
    # Products with EXL3's matrices, see `kernels/turns.py`:
    TURN_IN = 43  # scales activations and turns them by Hadamard's matrix
    TURN_OUT = 44  # turns a product's results, with the epilogue of a linear
    # Latent attention, see `kernels/latents.py`:
    COMPRESS = 18  # normalises compressed queries
    TURN = 19  # splits queries, rotates their positional parts, writes latents to the cache
    ABSORB = 20  # multiplies queries by the matrix that would expand latents to keys
    EXPAND = 21  # multiplies attention's results by the matrix that expands latents to values
    SHRINK_HEADS = 45  # SHRINK for what each head has, before either of these
    # An index that chooses tokens, see `kernels/index/`:
    ASK = 35  # writes its keys to the cache, rotates its queries
    SCORE = 36  # scores what tokens see, in steps of few tokens
    CHOOSE = 37  # chooses the tokens with the best scores
    ATTEND_CHOSEN = 38  # attention to these
    # An index that chooses blocks of tokens for each KV head, see `kernels/blocks/`:
    ASK_BLOCKS = 46  # writes its keys to the cache, rotates its queries
    SCORE_BLOCKS = 47  # scores blocks, in steps of few tokens
    CHOOSE_BLOCKS = 48  # lists the blocks with the best scores
    ATTEND_BLOCKS = 49  # attention to these
    # Several hidden states, of which gates let a part of a layer read; see `kernels/gated.py`:
    REPEAT = 50  # copies what is embedded to all of them
    SETTLE = 51  # adds what a part has said to all of them, normalises each
    MIX = 52  # the mean of what gates let through
    PICK = 53  # hands rows whose logits are wanted, not normalised, to products
    # Embeddings of n-grams, see `kernels/ngrams.py`:
    HASH = 54  # finds the rows of a table
    LOOK_UP = 55  # hands these rows to products
    WEIGH = 56  # multiplies values by gates, adds them to all hidden states
    SPREAD_OUT = 57  # adds a dilated convolution of them
    # An index that chooses blocks of tokens for all heads, see `kernels/pooled/`:
    ASK_POOLED = 58  # writes its tokens' keys to the cache, rotates its queries
    POOL_KEYS = 59  # makes one key of those of a block, for tokens that end one
    SCORE_POOLED = 60  # as for the other indexes of blocks, like the next ones
    CHOOSE_POOLED = 61
    ATTEND_POOLED = 62
    ASK_RUNS = 63  # of an index of runs of tokens over latents: the same as ASK_POOLED
    POOL_RUNS = 64  # and as POOL_KEYS, by learned weights
    # Several hidden states that are mixed as well, see `kernels/mixed.py`:
    FORK_MIXED = 65  # like FORK, GATHER and SCATTER
    GATHER_MIXED = 66
    SCATTER_MIXED = 67
    JOIN_MIXED = 68  # their mean


MIXING = (Code.ROUTE, Code.ARRANGE, Code.EXPERTS, Code.JOIN)
RARE = (
    *(Code.PLACE, Code.NORM_ROWS, Code.PASS_ON, Code.REORDER, Code.OPEN),
    *(Code.SCALE, Code.OWN_INPUT, Code.CUT, Code.COPY, Code.GATE_NORM),
)
KEEPING = (Code.CONVOLVE, Code.RECUR, Code.SCAN, Code.BLEND)
STREAMING = (Code.SPLIT, Code.PREDICT, Code.CORRECT, Code.SPREAD, Code.MERGE)
OF_HYPER = (Code.FORK, Code.GATHER, Code.SCATTER)
OF_PADDING = (Code.PAD, Code.CLOSE)
OF_INDEX = (Code.ASK, Code.SCORE, Code.CHOOSE, Code.ATTEND_CHOSEN)
OF_BLOCKS = (Code.ASK_BLOCKS, Code.SCORE_BLOCKS, Code.CHOOSE_BLOCKS, Code.ATTEND_BLOCKS)
OF_GATED = (Code.REPEAT, Code.SETTLE, Code.MIX, Code.PICK)
OF_NGRAMS = (Code.HASH, Code.LOOK_UP, Code.WEIGH, Code.SPREAD_OUT)
OF_POOLED = (
    *(Code.ASK_POOLED, Code.POOL_KEYS, Code.SCORE_POOLED, Code.CHOOSE_POOLED),
    *(Code.ASK_RUNS, Code.POOL_RUNS, Code.ATTEND_POOLED),
)
OF_MIXED = (Code.FORK_MIXED, Code.GATHER_MIXED, Code.SCATTER_MIXED, Code.JOIN_MIXED)
# Attention to blocks that an index chooses, which the row after that of the others has.
TO_BLOCKS = (Code.ATTEND_BLOCKS, Code.ATTEND_POOLED)
# Those that know K and V, and those that know an index's keys.
OF_KEYS = (Code.ROTATE, Code.TURN, Code.ATTEND, Code.ATTEND_CHOSEN, *TO_BLOCKS)
OF_INDEX_KEYS = (Code.ASK, Code.SCORE, Code.CHOOSE, *OF_BLOCKS[:3], *OF_POOLED[:-1])
TURNING = (Code.TURN_IN, Code.TURN_OUT)
OF_LATENTS = (Code.COMPRESS, Code.TURN, Code.ABSORB, Code.EXPAND, Code.SHRINK_HEADS)


class Epilogue(IntEnum):
    """What happens to the result of an operation."""

    STORE = 0  # float32, scaled, soft-capped and clipped
    ADD = 1  # scaled and added to float32 numbers in the target; soft-capped as a sum
    ACTIVATE = 2  # activated, as activations of the next product
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
    XIELU = 6  # with learned parameters, see `learned`
    SIGMOID = 7  # for gates, like the next one
    SOFTPLUS = 8


# Values of `DecoderSpec.gate_activation`.
GATES = {"sigmoid": Activation.SIGMOID, "softplus": Activation.SOFTPLUS}
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_bloom": Activation.GELU_TANH,  # which has a constant with fewer digits
    "quick_gelu": Activation.QUICK_GELU,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
    "xielu": Activation.XIELU,
}


@unique
class Buffer(IntEnum):
    """Buffers for the results of operations: one row per token of the step."""

    HIDDEN = 0  # float32 [T, hidden]: the residual stream
    NORMED = 1  # activations [T, hidden], or what a shared block reads
    QKV = 2  # float32 [T, queries, keys, values of all heads], followed by gates if there are any
    QUERY = 3  # activations [T, heads * head_dim], rotated and scaled
    ATTENDED = 4  # activations [T, heads * value_dim]
    INNER = 5  # activations [T, mlp_width]
    BRANCH = 6  # float32 [T, hidden]: a branch with a norm before it joins the residual stream
    LOGITS = 7  # float32 [wanted rows, padded vocabulary]
    WHOLE_8 = 8  # activations as integers, see `kernels/quantised/activations.py`
    WHOLE_16 = 9
    LONE = 10  # rows given from outside: activations, or float32 to be quantised
    PRODUCT = 11  # float32: the result of a lone linear layer
    LOW = 12  # activations [T, ranks of a layer's adapters]
    ACTIVE = 13  # activations [T, widest]: what QUANTISE reads, for SHRINK
    FLOATS = 14  # activations [T, widest] for weights that are not integers: float32, bfloat16
    # float32 [T, widest]: the result of a norm that QUANTISE reorders, or that has a gate
    UNSORTED = 15
    # Mixtures; each token has a row for each of its experts:
    ROUTED = 16  # float32 [T, padded experts]: the router's logits, also those of streams
    CHOSEN = 17  # int32 [T, per_token]: chosen experts
    PARTS = 18  # float32 [T, per_token]: their weights
    # int32 [1 + experts, 3]: number of experts with rows; then each, its first row, its end
    GROUPS = 19
    MEMBERS = 20  # int32 [rows]: for each row sorted by expert, its index in CHOSEN
    ARRANGED = 21  # activations [rows, hidden]
    OPENED = 22  # float32 [T, 32]: logits of the shared expert's router
    SHARED = 23  # float32 [T, hidden]: the result of the shared expert
    # Recurrent states and latent attention:
    # float32 [T, a mixer's projections], or what queries and latents are computed from, or a shared
    # block's gates, ups and low-rank inputs
    PROJECTED = 24
    # Activations [T, width]: a mixer's output, attention's after its gates, or what the last linear
    # of attention or an MLP reads after its norm; with latents, compressed queries, then the
    # unrotated parts of queries, then values; of a shared block, what the second of two low-rank
    # matrices reads, then opened gates.
    MIXED = 25
    # Float32: the inputs of the decay of each channel of a key [T, heads * key_dim]. For SCAN: time
    # steps, then their low-rank inputs, b and c. For BLEND: per head, input gates and decay gates.
    # With latents: gates of values that come from compressed queries.
    DECAYS = 26
    OWN = 27  # float32 [T, layers * width]: per-layer embeddings
    DENSE = 28  # float32 [T, hidden]: the result of an MLP with experts beside it
    STREAMS = 29  # float32 [T, count * hidden]: all hidden states of a token, if it has several
    # float32 [T, 2 * hidden]: what a shared block reads, a hidden state and the first layer's input
    BOTH = 30
    ASKED = 31  # like QUERY [T, heads * dim]: an index's queries
    # Float32 [fewer T, longest context], or for blocks [fewer T, KV heads, blocks]: its scores, in
    # steps of few tokens.
    SCORES = 32
    # Int32: the places that it has chosen [T, most], ascending. Of blocks [T, KV heads]: how many
    # pairs follow, and nothing; KV blocks of the context, each with a mask of its tokens.
    CHOICE = 33
    # Float32 [T, 32]: weights of hidden states, in what is read and of the result, then from each
    # to each; of gated ones, of what a part has said, before their activation.
    SHARES = 34
    # Experts that adapters change, see `kernels/mixture/member_runs.py`:
    MEMBER_RUNS = 35  # int64: how many there are; [rows, 3]: the runs; [rows]: scratch memory
    MEMBER_RUN_OF = 36  # int32 [rows]: the run of each row sorted by expert
    UNCODED = 37  # activations [rows, hidden]: what ARRANGED is, where that has codes
    RAW = 38  # float32 [T, outputs]: products that TURN_OUT has yet to turn
    GATES = 39  # float32 [T, width]: turned gates, whose ups are in RAW
    FOUND = 40  # int64 [T, heads]: rows of a table of n-grams
    DIGITS = 41  # bytes of activations whose rows share a scale, see `kernels/quantised/digits.py`


class Routing(IntEnum):
    """How a token chooses its experts; `ROUTINGS` has the values of `ExpertsSpec.routing`."""

    SOFTMAX = 0
    SPARSE_MIXER = 1
    GROUPED_SOFTMAX = 2
    GROUPED_SIGMOID = 3
    SIGMOID = 4


ROUTINGS = {
    "softmax": Routing.SOFTMAX,
    "biased-softmax": Routing.SOFTMAX,  # with `choice_bias` or without
    "sparse-mixer": Routing.SPARSE_MIXER,
    "grouped-softmax": Routing.GROUPED_SOFTMAX,
    "grouped-sigmoid": Routing.GROUPED_SIGMOID,
    "sigmoid": Routing.SIGMOID,
}


class GroupNorm(IntEnum):
    """Whether OPEN has a norm; `GROUP_NORMS` has the values of `Mamba2.norm`."""

    NONE = 0
    BEFORE = 1  # before the gate
    BEHIND = 2  # after the gate


GROUP_NORMS = {
    "none": GroupNorm.NONE,
    "before gate": GroupNorm.BEFORE,
    "behind gate": GroupNorm.BEHIND,
}


class Form(IntEnum):
    """The forms in which later products need an operation's result, as bits."""

    PLAIN = 1  # like activations of the step's variant
    WHOLE_8 = 2
    WHOLE_16 = 4
    WIDE = 8  # float32, for QUANTISE to read: in the target, or for a norm in UNSORTED
    FLOATS = 16
    PAIRS = 32  # bfloat16, in the buffer FLOATS
    DIGITS_8 = 64  # integers with a scale for each row, in the buffer DIGITS
    DIGITS_16 = 128


OPERATION = np.dtype(
    [
        ("code", "i8"),
        ("source", "i8"),  # Buffer
        ("target", "i8"),  # Buffer
        ("epilogue", "i8"),
        ("activation", "i8"),
        ("wanted_only", "i8"),  # 1: only for the tokens whose logits are wanted
        ("weights", "i8"),  # embedding rows, norm weights (0: none) or packed panels
        # float32: of int8 weights and for TURN_OUT [outputs], for TURN_IN [inputs]; 0: none
        ("scales", "i8"),
        ("bias", "i8"),  # 0: none
        ("inputs", "i8"),  # features of a source row
        ("outputs", "i8"),  # features of a linear, padded to whole panels
        ("width", "i8"),  # features of a target row
        ("offset", "i8"),  # offset of a linear's first feature in a target row
        ("bounds_opened", "i8"),  # 1: for GATE, `clip` is that of activated gates
        ("raised", "i8"),  # 1: for GATE with a `clip`, 1 is added to ups
        ("forms", "i8"),  # bits of Form
        ("multiply", "i8"),  # a way, for quantised weights; 0: the step's own product
        ("active_bytes", "i8"),  # bytes of a block of quantised activations
        ("facts_bytes", "i8"),  # bytes after the blocks of a row
        ("panel_bytes", "i8"),  # bytes of a panel of quantised weights
        # int32: for QUANTISE [inputs], the feature at each place, -1: 0; for TURN [rotated], for
        # REORDER, PAD and what asks or pools for an index [head_dim]; 0: in the model's order
        ("order", "i8"),
        ("span_blocks", "i8"),
        # `expand` of adapters (for SHRINK and SHRINK_HEADS: `shrink`); 0: the step has none
        ("expand", "i8"),
        # a linear's number among those that adapters change; that of its first expert or head
        ("site", "i8"),
        ("by_member", "i8"),  # 1: runs are those of rows sorted by expert
        ("room_bytes", "i8"),  # bytes of an unpacked block
        ("parts", "i8"),  # scales of an unpacked block, for EMBED
        ("lows", "i8"),  # lows of an unpacked block
        ("zero", "i8"),  # the zero code of an unpacked block
        ("centred", "i8"),  # 1: LayerNorm, 0: RMSNorm
        ("keys", "i8"),  # the layer's K and V, or an index's keys
        # of an index of pooled keys: int32 [slots, 3], each token's rotary positions
        ("values", "i8"),
        ("heads", "i8"),  # of queries
        ("kv_heads", "i8"),
        ("head_dim", "i8"),  # of a query and a key; for NORM_ROWS 0: features are no heads
        ("value_dim", "i8"),
        ("reads_only", "i8"),  # 1: there are only queries; K and V are another layer's
        ("keys_as_values", "i8"),  # 1: values are keys before their norm and rotation
        ("value_norm", "i8"),  # 1: values are normalised, without weights
        ("causal", "i8"),  # 1: causal attention; 0: `lasts` has the last token to attend to
        # Tokens that an index chooses, for ATTEND too: it leaves out tokens that see more. 0: none.
        ("most", "i8"),
        ("window", "i8"),  # 0: none
        ("chunk", "i8"),  # tokens attend only within chunks of this many positions; 0: no chunks
        ("cosines", "i8"),  # float32 [positions, rotated / 2]; 0: no rotary positions
        ("sines", "i8"),
        ("rotated", "i8"),  # leading dimensions of a head that are rotated
        # int32 [rotated / 2]: which of three positions rotates each pair; 0: the first
        ("axes", "i8"),
        ("query_norm", "i8"),  # float32 [head_dim]; 0: none
        ("key_norm", "i8"),
        ("norm_last", "i8"),  # 1: heads are rotated, then normalised
        ("query_scales", "i8"),  # float32 [positions]: factors of queries by position; 0: none
        ("logs", "i8"),  # float32 [positions]: logarithms of positions, counted from 1
        # float32 [heads, 2]: of queries, factors of such a logarithm and what is added; 0: none
        ("log_scales", "i8"),
        # float32 [4]: xIELU's factors of x^2, of the exponential part and of x, and the bound of
        # e^x
        ("learned", "i8"),
        ("slopes", "i8"),  # float32 [heads]: slopes of linear biases (ALiBi); 0: none
        ("sinks", "i8"),  # float32 [heads]: scores of attention sinks; 0: none
        ("eps", "f4"),
        ("scale", "f4"),
        ("cap", "f4"),  # 0: none
        ("key_scale", "f4"),  # scales of 8-bit K and V
        ("value_scale", "f4"),
        ("value_factor", "f4"),  # factor of values
        # results are clipped to this magnitude, for GATE gates and ups; 0: none
        ("clip", "f4"),
        ("spare", "f4"),
        # entry of an operation that is compiled apart, see `kernels/linked_calls.py`; 0: none
        ("kernel", "i8"),
        # Its record: MIXTURE, MIXER, OPENING, LATENT, OWN, PADDING, STREAM, BLOCKS, GATED or NGRAMS
        ("facts", "i8"),
        # Features in a source row: per head for ABSORB, EXPAND and SHRINK_HEADS, which have as many
        # in a row of LOW as `width` says; all of them for PASS_ON, and for
        # a linear that reads a part; 0: `inputs`
        ("span", "i8"),
        ("begin", "i8"),  # offset of a linear's first input in a source row
        ("states", "i8"),  # slots of `state_bytes` each
        ("state_bytes", "i8"),
    ]
)

MIXTURE = np.dtype(
    [
        ("count", "i8"),  # experts
        ("per_token", "i8"),
        ("routing", "i8"),  # Routing
        ("normalise", "i8"),  # 1: weights of the chosen experts sum to one
        ("groups", "i8"),
        ("groups_used", "i8"),
        ("choice_bias", "i8"),  # float32 [count]; 0: none
        ("expert_scale", "i8"),  # float32 [count]: factors of each expert's weight; 0: none
        ("weighs_inputs", "i8"),  # 1: weights multiply the experts' inputs, not their outputs
        ("paired", "i8"),  # 1: rows of gate and up alternate one by one, not by 16
        ("raised", "i8"),  # 1: with a limit, 1 is added to ups
        ("bounds_opened", "i8"),  # 1: the limit is that of activated gates
        ("jitter", "f4"),
        ("scale", "f4"),  # of the weights
        ("limit", "f4"),  # clips gate and up; 0: none
        ("spare", "f4"),
    ]
)

# Mixers with a recurrent state. The first fields are CONVOLVE's, the others RECUR's; places are
# offsets in a row of PROJECTED. Comments below are for SCAN and BLEND.
MIXER = np.dtype(
    [
        ("channels", "i8"),
        ("taps", "i8"),
        ("kernel", "i8"),  # float32 [channels / 16, taps, 16], the weight of the token itself last
        ("bias", "i8"),  # float32 [channels]; 0: none
        ("first", "i8"),  # place of the first channel
        ("gated", "i8"),  # 1: channels of b, c and x, see `ShortConvolution`; 0: followed by SiLU
        ("bare", "i8"),  # 1: not followed by an activation
        ("heads", "i8"),
        ("sharing", "i8"),  # neighbouring heads that share a query and a key
        ("key_heads", "i8"),  # number of queries and keys; heads beyond begin again with the first
        ("key_dim", "i8"),
        ("value_dim", "i8"),
        ("query", "i8"),  # place of the first head's
        ("key", "i8"),
        ("value", "i8"),
        ("beta", "i8"),
        ("decay", "i8"),
        ("rate", "i8"),  # float32 [heads], negative: of the decay
        ("decay_bias", "i8"),  # float32 [heads]; by channel [heads, key_dim]
        ("by_channel", "i8"),  # 1: inputs of decays are in DECAYS, not at `decay`
        ("skip", "i8"),  # float32 [heads]: factor of a value that is added to the output; 0: none
        ("corrects", "i8"),  # 1: a delta rule, 0: Mamba-2
        # SCAN: `channels` from place 0 on, with `key_dim` numbers each; key and query are places of
        # b and c in a row of DECAYS; `rate` float32 [channels / 16, key_dim, 16], `decay_bias` and
        # `skip` [channels]. BLEND: `channels` from `first` on, and `rate` [channels].
        ("gate", "i8"),  # place of the first channel's gate
        ("decays_width", "i8"),  # features of a row of DECAYS
        ("head_dim", "i8"),  # for BLEND: channels whose gates are adjacent
        ("beta_scale", "f4"),
        ("least_step", "f4"),  # bounds of the time step
        ("most_step", "f4"),
        # by channel: bound of a decay's logarithm, which is this times a sigmoid; 0: none
        ("least_decay", "f4"),
    ]
)

LATENT = np.dtype(
    [
        ("rank", "i8"),
        ("plain_dim", "i8"),  # of a query: unrotated, and rotated
        ("rotary_dim", "i8"),
        ("query_width", "i8"),  # features of a row of queries
        ("place", "i8"),  # of the latent in a row of PROJECTED, followed by the rotated key
    ]
)

# For PAD and CLOSE.
PADDING = np.dtype(
    [
        ("dim", "i8"),  # of a query or key, without padding
        ("value_dim", "i8"),
        ("queries", "i8"),  # in a row, including keys
        ("values", "i8"),
    ]
)

OPENING = np.dtype(
    [
        ("gates", "i8"),  # Buffer, float32
        ("gate_width", "i8"),  # features of a row of gates
        ("gate_place", "i8"),  # of the first gate
        ("gate_size", "i8"),  # features that share a gate
        ("group", "i8"),  # features that are normalised together
        ("norm", "i8"),  # GroupNorm
        ("activation", "i8"),  # of gates
    ]
)

# For OWN_INPUT.
OWN = np.dtype(
    [
        ("table", "i8"),  # [rows, width], in the model's dtype
        ("rows", "i8"),  # other token ids get row 0
    ]
)

# For SPLIT, PREDICT, CORRECT, SPREAD and MERGE.
STREAM = np.dtype(
    [
        ("count", "i8"),
        ("active", "i8"),  # the stream that layers compute
        # float32 [count, count], for PREDICT [count * count, count]: factors of the router's
        # results
        ("coefficients", "i8"),
        # float32 [hidden]: factors of the stream that CORRECT writes to HIDDEN; 0: none
        ("scale", "i8"),
    ]
)

# For an index of blocks.
BLOCKS = np.dtype(
    [
        # tokens of a block: a multiple of those of a KV block, or with pooled keys any number
        ("size", "i8"),
        ("most", "i8"),  # blocks to choose
        ("local", "i8"),  # of which so many are the last ones
        ("lists", "i8"),  # of a token: one, or one for each KV head
        ("queries", "i8"),  # place of the first query in a row of QKV
        ("key", "i8"),
        ("choice_bytes", "i8"),  # of a list in CHOICE
        ("kept", "i8"),  # numbers in the cache of a token, with pooled keys
        # Of runs: place of the first head's weight in a row of PROJECTED, and its features; 0: none
        ("weights", "i8"),
        ("weights_width", "i8"),
    ]
)

# For REPEAT, SETTLE, MIX and PICK.
GATED = np.dtype(
    [
        ("count", "i8"),  # hidden states
        ("adds", "i8"),  # 1: SETTLE adds what is in BRANCH
    ]
)

# For HASH, LOOK_UP, WEIGH and SPREAD_OUT.
NGRAMS = np.dtype(
    [
        ("order", "i8"),  # tokens of the longest
        ("heads", "i8"),  # of all sizes together
        ("factors", "i8"),  # int64 [order]: of a token, of the one before it, ...
        ("rows", "i8"),  # int64 [heads]: what a hash is divided by
        ("firsts", "i8"),  # int64 [heads]: the first row of each head
        ("end", "i8"),  # the token that ends a text
        ("parts", "i8"),  # int64: addresses of the table's parts, with `part_rows` rows each
        ("part_rows", "i8"),
        ("size", "i8"),  # numbers of a row of the table, in the model's dtype
        ("count", "i8"),  # hidden states
        # Weights of norms, float32 [count * hidden], and what is added to a mean square.
        ("query_norm", "i8"),
        ("key_norm", "i8"),
        ("kernel_norm", "i8"),
        ("kernel", "i8"),  # float32 [channels / 16, taps, 16], the weight of the token itself last
        ("taps", "i8"),
    ]
)

# For FORK, GATHER and SCATTER, and where states are mixed.
HYPER = np.dtype(
    [
        ("count", "i8"),  # hidden states
        ("weights", "i8"),  # to compute: `count` of what is read, then those of the result, if any
        ("mix", "i8"),  # float32 [weights, count * hidden]
        ("bases", "i8"),  # float32 [weights]
        ("scales", "i8"),  # float32, one of each kind
        ("iterations", "i8"),  # by which weights of the mixture, the third kind, are balanced
        # the largest weight of each kind, and what is added to it
        ("read", "f4"),
        ("read_eps", "f4"),
        ("added", "f4"),
        ("added_eps", "f4"),
    ]
)

STEP = np.dtype(
    [
        ("threads", "i8"),
        ("spins", "i8"),  # looks at a barrier before the core is yielded
        ("tile", "i8"),  # tokens of a work item of attention
        ("first", "i8"),  # operations to run
        ("end", "i8"),
        ("tokens", "i8"),  # T
        ("wanted", "i8"),  # tokens whose logits are wanted
        ("wanted_ids", "i8"),  # int32 [wanted]: their indices in the flat list
        ("token_ids", "i8"),  # int32 [T]
        ("positions", "i8"),  # int32 [T]
        ("lasts", "i8"),  # int32 [T]: the last position that each token attends to
        ("turns", "i8"),  # int32 [T]: rotary positions; with three axes, [3, T]
        ("turn_stride", "i8"),  # bytes from one axis to the next; 0: there is one axis
        ("slots", "i8"),  # int32 [T]
        ("tables", "i8"),  # int32 [R, table_width]
        ("table_width", "i8"),
        ("rows", "i8"),  # int32 [T]: row of `tables` of each token
        ("runs", "i8"),  # int64 [run_count, 3], see `kernels/adapters.py`
        ("run_count", "i8"),
        ("run_of", "i8"),  # int32 [T]
        # the same of the tokens whose logits are wanted
        ("wanted_runs", "i8"),
        ("wanted_run_count", "i8"),
        ("wanted_run_of", "i8"),
        ("factors", "i8"),  # 1: an adapter of the step has gains or offsets
        ("low_stride", "i8"),  # bytes of a row of LOW
        ("scores_bytes", "i8"),  # room for one head's scores
        ("scratch", "i8"),  # scratch memory of all threads
        ("scratch_bytes", "i8"),  # of each thread
        ("row_count", "i8"),  # R, if there are states; each row has its tokens and its slots
        ("row_starts", "i8"),  # int32 [R + 1]
        ("state_reads", "i8"),  # int32 [R]: slot of the state before; -1: zeros
        ("state_writes", "i8"),  # int32 [R]: slot for the state after
        ("arrived", "i8"),  # arrivals at barriers before this step
        ("buffers", "i8", (len(Buffer),)),
    ]
)

# A row whose next token is to be chosen: the settings, and the results.
ROW = np.dtype(
    [
        ("scores", "i8"),  # float32 [chunks * 128]; -inf: cannot be chosen
        ("chunks", "i8"),
        ("maxima", "i8"),  # float32 [chunks]: written by the kernels, like the next two
        ("masses", "i8"),  # float32 [chunks]
        ("keys", "i8"),  # int64 [width or more]: candidates, see `kernels/sampling/candidates.py`
        # What to do, in this order; 0: skip it.
        ("allowed", "i8"),  # mask all tokens whose bits here are 0, lowest bit first
        ("truncates", "i8"),  # mask what truncation excludes, in place
        ("finds_best", "i8"),  # find the best score, and that of each chunk
        ("weighs", "i8"),  # 1: find the mass, 2: the entropy as well
        ("picks", "i8"),  # 1: choose the best token, 2: draw one
        ("width", "i8"),  # candidates to list
        ("top_k", "i8"),  # "off" as in SamplingParameters
        ("top_p", "f8"),
        ("typical_p", "f8"),
        ("uniform", "f8"),  # the random number of a draw, in [0, 1)
        ("best", "f4"),  # largest score; NaN if any score is NaN
        ("sharpness", "f4"),  # 1 / temperature: scores count as (score - best) * sharpness
        ("floor", "f4"),  # least score after scaling; -inf: none
        # The results.
        ("mass", "f8"),  # sum of e^score
        ("entropy", "f8"),  # in nats
        ("token", "i8"),
        ("score", "f4"),  # of the token, relative and scaled
    ]
)

# Numbers of int64 in records of adapters: a run, a site of an adapter, a piece of its outputs.
RUN, SITE, PIECE = 3, 6, 7
FACTORS = 4  # where gains and offsets begin in a site

# How a panel of quantised weights is used: multiplied as stored; unpacked first; unpacked already;
# unpacked if there are many rows.
DIRECT, UNPACK, UNPACKED, UNPACK_FOR_MANY = 0, 1, 2, 3
