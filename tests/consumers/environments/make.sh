#!/usr/bin/env bash
# Make the environment of one consumer: make.sh NAME. It is kept and made once.
#
# Each consumer pins what it wants, so each has a folder of its own under $MXFP4_CONSUMERS
# (default ~/.cache/mxfp4-consumers). What is installed stands in NAME.txt beside this script.
set -euo pipefail

name=$1
here=$(cd "$(dirname "$0")" && pwd)
home=${MXFP4_CONSUMERS:-$HOME/.cache/mxfp4-consumers}
target=$home/$name
wanted=$here/$name.txt

if cmp -s "$wanted" "$target/installed.txt"; then
    exit 0
fi
rm -rf "$target"
mkdir -p "$home"
"${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -m pip install --quiet --disable-pip-version-check -r "$wanted"
if [ "$name" = vllm ]; then
    # Their PyPI builds are linked against another torch and break the imports of transformers.
    "$target/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
fi
if [ "$name" = llama ]; then
    # Only the converter is used, which lies in the source archive; nothing is built.
    "$target/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps \
        --no-build-isolation --no-binary llama-cpp-python -d "$target" llama-cpp-python==0.3.36
    mkdir "$target/source"
    tar -xzf "$target"/llama_cpp_python-*.tar.gz -C "$target/source" --strip-components=1
    rm "$target"/llama_cpp_python-*.tar.gz
fi
cp "$wanted" "$target/installed.txt"
