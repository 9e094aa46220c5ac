#!/bin/sh
# Build llama.cpp's benchmark and its GGUF writer:  sh bench/peers/llama_cpp.sh FOLDER
# From the sources that the package llama-cpp-python brings; needs cmake and a C++ compiler, and
# takes ten minutes on two cores. Then:  python -m bench.model --llama-cpp FOLDER
set -eu
folder=$1
mkdir -p "$folder"
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet gguf
"$folder/venv/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$folder" llama-cpp-python
mkdir -p "$folder/source"
tar xzf "$folder"/llama_cpp_python-*.tar.gz --strip-components 1 -C "$folder/source"
cmake -S "$folder/source/vendor/llama.cpp" -B "$folder/build" -DCMAKE_BUILD_TYPE=Release \
    -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_TESTS=OFF
cmake --build "$folder/build" --target llama-batched-bench
