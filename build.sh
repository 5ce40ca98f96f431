#!/usr/bin/env bash
# Make .venv and install DeepInfer with its development tools. Does nothing when everything is in place.
#
#   DEEPINFER_ACCELERATOR=nvidia|cpu|ascend   what to install for; unset: nvidia where nvidia-smi works, else cpu
#   PYTHON=/path/to/python3                   which interpreter makes .venv; unset: the first of 3.11, 3.12, 3.13, python3
#   TORCH="what pip installs for torch"       unset: torch==2.13.0 without a GPU, torch>=2.11 with one. On Linux the usual
#                                             package index may serve a build with GPU libraries (some GB); name a CPU
#                                             wheel here to save them
set -euo pipefail
cd "$(dirname "$0")"

say() { printf 'build.sh: %s\n' "$*"; }
fail() { printf 'build.sh: error: %s\n' "$*" >&2; exit 1; }

accelerator="${DEEPINFER_ACCELERATOR:-}"
if [ -z "$accelerator" ]; then
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then accelerator=nvidia; else accelerator=cpu; fi
fi
case "$accelerator" in
    nvidia | cpu | ascend) ;;
    *) fail "DEEPINFER_ACCELERATOR is '$accelerator': choose nvidia, cpu or ascend, or unset it to detect" ;;
esac

# The stamp names everything that decides what is installed. Same stamp, working interpreter: nothing to do.
stamp_file=.venv/.deepinfer-stamp
stamp="$accelerator $(cat pyproject.toml build.sh | cksum) $(pwd)"
if [ -f "$stamp_file" ] && [ "$(cat "$stamp_file")" = "$stamp" ] && .venv/bin/python -c '' 2>/dev/null; then
    exit 0
fi

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }
if ! { [ -x .venv/bin/python ] && usable .venv/bin/python; }; then
    python=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if usable "$candidate"; then python="$candidate"; break; fi
    done
    [ -n "$python" ] || fail "no Python >= 3.11 with venv and pip found; install one (Debian: python3-venv) or set PYTHON"
    say "making .venv with $("$python" --version)"
    rm -rf .venv
    "$python" -m venv .venv
fi
pip() { .venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }


# With a GPU, a torch that is there but has no CUDA will not do either.
torch_check='import torch'
if [ "$accelerator" = nvidia ]; then torch_check='import torch; assert torch.version.cuda'; fi
if ! .venv/bin/python -c "$torch_check" 2>/dev/null; then
    say "installing torch for $accelerator (the first time takes some minutes)"
    if [ -n "${TORCH:-}" ]; then
        # shellcheck disable=SC2086  # options and several names are welcome
        pip install $TORCH
    elif [ "$accelerator" = nvidia ]; then
        pip install --upgrade 'torch>=2.11'
    elif ! pip install 'torch==2.13.0'; then
        # Any later release runs the CPU engine as well; it may be a build with GPU libraries, so larger.
        say "torch 2.13.0 is not to be had here: taking the newest torch >= 2.11 that is"
        pip install 'torch>=2.11'
    fi
fi
say "installing DeepInfer and its development tools"
extras=dev
if [ "$accelerator" = nvidia ]; then extras=dev,nvidia; fi
pip install --editable ".[$extras]"
# Structured output uses the compiled part of this package only; its declared needs are whole frameworks for the rest.
pip install --no-deps 'xgrammar>=0.2.9,<0.3'
.venv/bin/python -c 'import deepinfer, torch; print(f"build.sh: ready, torch {torch.__version__}")'
case "$accelerator" in
    nvidia) say "note: the engine takes the GPU when asked to: accelerator=\"nvidia\" or DEEPINFER_ACCELERATOR=nvidia" ;;
    ascend) say "note: this version has no Ascend backend yet, so torch_npu is not installed; the engine runs on the CPU" ;;
esac
printf '%s\n' "$stamp" >"$stamp_file"
