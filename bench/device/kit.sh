#!/bin/bash
# Everything that a machine with a device can say, in four times ten minutes. From a checkout's root:
#     bash bench/device/kit.sh                    # env plain tests: what is most wanted
#     bash bench/device/kit.sh env kernels more   # kernels' tests; codes, adapters, mixture, peers
#     bash bench/device/kit.sh env index chosen   # models that attend to what an index chooses
#     bash bench/device/kit.sh env states         # models that keep states, and other tiles for them
#     bash bench/device/kit.sh env copies         # blocks to the host's memory and back; a minute
#     bash bench/device/kit.sh STAGE ...          # any of them, in this order
# Each stage, and each part of a benchmark, is a process of its own with a time of its own: one that
# crashes or hangs costs no other. Writes to $OUT (bench/out/device), as it goes: log.txt, plain.json,
# more.json, chosen.json and states.json with their rows beside them, copies.json, tests.xml,
# kernels.xml, index.xml, traces.tar.
# Eight files at most by the stages of one of these lines.
# KIT_WHEELS: a folder of wheels that are installed beside the checkout first, where there is no
# network: `wheels.sh` fetches them. KIT_DRY=1: without a device, over the stand-in.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
OUT=${OUT:-bench/out/device}
mkdir -p "$OUT"
log=$OUT/log.txt
: >"$log"
python=${PYTHON:-python3}
wanted=" ${*:-env plain tests} "
began=$SECONDS
failed=0
patience=$((${KIT_DRY:+9} + 1)) # a dry run may share its machine with others
seconds=${KIT_SECONDS:-570}     # of all stages
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

stage() { # name, seconds, command...: run it, no longer than that and than there is time
    local name=$1 limit=$2 at=$SECONDS left=$((seconds * patience - (SECONDS - began))) rc
    limit=$((limit * patience))
    shift 2
    case $wanted in *" $name "*) ;; *) return 0 ;; esac
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        echo "$name: not begun, the time was up" | tee -a "$log"
        failed=1
        return 0
    fi
    timeout -k 5 "$limit" "$@" >"$log.$name" 2>&1
    rc=$?
    tail -c 2000000 "$log.$name" >>"$log" # a larger file may not come back
    tail -n 30 "$log.$name" | cut -c 1-200
    rm "$log.$name"
    [ "$rc" -eq 0 ] || failed=1
    echo "$name: exit $rc after $((SECONDS - at)) s" | tee -a "$log"
}

if [ -n "${KIT_WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" \
        "$KIT_WHEELS"/*.whl || exit 1
    export PYTHONPATH=$site:$PYTHONPATH
fi

device=("$python" -m bench.device)
plain=(--weights plain --traces "$OUT")
more=(--shapes 8B mixture 1B --only mixture '8B batch invariant' '8B int4' '8B fp8' '8B q4_k' '8B exl3' '1B adapters' '1B without few rows'
    '1B without heads in products' '1B without measured shares' '1B without measured carve-outs' '1B without the last norm in a product'
    '1B without early choices' '1B without looking up at once' --peers --traces "$OUT")
copies=("$python" -m bench.device.host_copies)
chosen=(--shapes tokens blocks entries --weights plain --only 'tokens tiles' tokens blocks entries)
states=(deltas mamba2 mamba1 gates)
states=(--shapes "${states[@]}" mixture --weights plain --only "${states[@]}" "${states[@]/%/ tiles}" 'mixture tiles')
if [ -n "${KIT_DRY:-}" ]; then
    device+=(--dry-run)
    copies+=(--dry-run)
    chosen=(--shapes tokens blocks entries --only 'dry tokens tiles' 'dry tokens' 'dry blocks' 'dry entries')
    states=('dry deltas' 'dry mamba2' 'dry mamba1' 'dry gates')
    states=(--shapes "${states[@]#dry }" mixture --only "${states[@]}" "${states[@]/%/ tiles}" 'dry mixture tiles')
    plain=(--only dry 'server tiny' 'broken device tiny' --traces "$OUT")
    more=(--only 'dry int4' 'dry exl3' 'dry batch invariant' 'dry adapters' 'dry without few rows' 'dry without heads in products' --traces "$OUT")
fi
# Tests are compiled for, some seconds each, beside each other where pytest can.
tests=(env OMP_NUM_THREADS=2 "$python" -m pytest -q -p no:cacheprovider)
"$python" -c "import xdist" 2>>"$log" && tests+=(-n "${KIT_WORKERS:-6}")
of=tests/shard/torch_backend

stage env 40 bash -c 'nvidia-smi || rocm-smi; uname -a; nproc; free -g | head -2; "$0" -c "
import sys, torch, numpy, transformers
print(sys.version, torch.__version__, numpy.__version__, transformers.__version__)
print(torch.accelerator.current_accelerator(check_available=True))
import tgi_trio.shard.torch_backend.torch_loading, tgi_trio.launcher, triton
print(triton.__version__)"' "$python"
stage plain 400 "${device[@]}" --budget 385 --adapters 0 "${plain[@]}" --json "$OUT/plain.json"
stage tests 160 "${tests[@]}" tests/gpu --junitxml "$OUT/tests.xml"
stage kernels 170 "${tests[@]}" "$of/test_paged_attention.py" "$of/test_device_sampler.py" \
    "$of/test_lookup_kernel.py" "$of/test_routing_kernel.py" "$of/test_adapter_kernels.py" \
    "$of/test_fused_kernels.py" "$of/test_coded_products.py" "$of/test_trellis_products.py" \
    "$of/states/test_convolution_kernel.py" "$of/states/test_delta_rule_kernels.py" \
    "$of/states/test_recurrence_kernels.py" --junitxml "$OUT/kernels.xml"
stage more 390 "${device[@]}" --budget 375 "${more[@]}" --json "$OUT/more.json"
stage index 180 "${tests[@]}" "$of/test_selecting.py" "$of/test_paged_indexed.py" \
    "$of/test_paged_blocks.py" "$of/test_paged_pooled.py" "$of/test_paged_entries.py" \
    "$of/test_hyper_kernels.py" "$of/test_gated_streams.py" --junitxml "$OUT/index.xml"
stage chosen 330 "${device[@]}" --budget 315 "${chosen[@]}" --traces "$OUT" --json "$OUT/chosen.json"
stage copies 60 "${copies[@]}" --json "$OUT/copies.json"
stage states 400 "${device[@]}" --budget 385 "${states[@]}" --traces "$OUT" --json "$OUT/states.json"
(cd "$OUT" && ls trace-*.json.gz >/dev/null 2>&1 && tar -cf traces.tar trace-*.json.gz &&
    rm trace-*.json.gz)
ls -l "$OUT"
exit $failed
