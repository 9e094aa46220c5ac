#!/bin/bash
# Fetches what a machine without a network lacks, as wheels of the versions in constraints.txt:
#     bash bench/device/wheels.sh [folder] [minor version of its Python]      # .whl and 12
# For an image that has torch, Triton, numpy, llvmlite (with numba), transformers, pytest, plugins (xdist,
# timeout), peft and httpx. 5 MB without transformers, which is among them, as an older one may
# compute what tests compare with in another way: 18 MB with it. Then, over there:
#     KIT_WHEELS=.whl bash bench/device/kit.sh
set -eu
cd "$(dirname "$0")/../.."
out=${1:-.whl}
minor=${2:-12}
names="msgspec orjson llguidance trio outcome sniffio Hypercorn httptools Quart quart-trio
    Flask blinker itsdangerous priority wsproto h2 hpack hyperframe pytest-trio gguf transformers"
wanted=()
for name in $names; do
    line=$(grep -i "^$name==" constraints.txt) || { echo "constraints.txt lacks $name" >&2; exit 1; }
    wanted+=("$line")
done
platforms=()
for tag in manylinux_2_{39,35,34,31,28,27,24,17,12}_x86_64 manylinux2014_x86_64 manylinux1_x86_64; do
    platforms+=(--platform "$tag")
done
"${PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps \
    --only-binary=:all: --implementation cp --python-version "3.$minor" "${platforms[@]}" \
    -d "$out" "${wanted[@]}"
du -sh "$out"
