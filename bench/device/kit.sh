#!/bin/bash
# Everything that a machine with a device can say, within ten minutes. From the root of a checkout:
#     bash bench/device/kit.sh [stage ...]        # env tests codes adapters bench; none named: all
# Writes to $OUT (bench/out/device): log.txt, tests.xml, codes.xml, adapters.xml, device.json, Chrome traces.
# KIT_WHEELS: a folder of wheels that are installed beside the checkout first, where there is no
# network: `pip download -d FOLDER --no-deps NAME==VERSION ...` of what constraints.txt pins and the
# machine lacks. KIT_DRY=1: without a device, over the stand-in.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root" || exit 1
OUT=${OUT:-bench/out/device}
mkdir -p "$OUT"
log=$OUT/log.txt
: >"$log"
python=${PYTHON:-python3}
wanted=" ${*:-env tests codes adapters bench} "
began=$SECONDS
failed=0
patience=$((${KIT_DRY:+9} + 1)) # a dry run may share its machine with others
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false

stage() { # name, seconds, command...: run it, no longer than that and than ten minutes leave
    local name=$1 limit=$2 at=$SECONDS left=$((580 * patience - (SECONDS - began))) rc
    limit=$((limit * patience))
    shift 2
    case $wanted in *" $name "*) ;; *) return 0 ;; esac
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        echo "$name: not begun, the time was up" | tee -a "$log"
        failed=1
        return 0
    fi
    timeout -k 5 "$limit" "$@" 2>&1 | tee -a "$log" | tail -n 40
    rc=${PIPESTATUS[0]}
    [ "$rc" -eq 0 ] || failed=1
    echo "$name: exit $rc after $((SECONDS - at)) s" | tee -a "$log"
}

if [ -n "${KIT_WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$python" -m pip install -q --no-index --no-deps --no-compile --target "$site" \
        "$KIT_WHEELS"/*.whl || exit 1
    export PYTHONPATH=$site:$PYTHONPATH
fi

tests=(tests/gpu tests/shard/torch_backend/test_paged_attention.py
    tests/shard/torch_backend/test_device_sampler.py)
bench=(--peers --json "$OUT/device.json" --traces "$OUT")
if [ -n "${KIT_DRY:-}" ]; then
    tests=(tests/gpu)
    bench=(--dry-run --json "$OUT/device.json" --traces "$OUT")
fi
stage env 60 bash -c 'nvidia-smi || rocm-smi; uname -a; nproc; "$0" -c "
import sys, torch, numpy
print(sys.version, torch.__version__, numpy.__version__)
print(torch.accelerator.current_accelerator(check_available=True))
import tgi_trio.shard.torch_backend.torch_loading, triton
print(triton.__version__)"' "$python"
stage tests 150 "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" --junitxml "$OUT/tests.xml"
if [ -z "${KIT_DRY:-}" ]; then # each kind is compiled, some seconds of them
    stage codes 80 "$python" -m pytest -q -p no:cacheprovider \
        tests/shard/torch_backend/test_coded_products.py \
        -k "gguf or formats or half or eight" --junitxml "$OUT/codes.xml"
    stage adapters 50 "$python" -m pytest -q -p no:cacheprovider \
        tests/shard/torch_backend/test_adapter_kernels.py --junitxml "$OUT/adapters.xml"
fi
stage bench 400 "$python" -m bench.device --budget 330 "${bench[@]}"
exit $failed
