#!/usr/bin/env bash
# Run everything that only a CUDA device can show, in under twelve minutes: the GPU tests, the loss and the scores of
# tokens beside their peers, the rows of a chunk, training. Logs and figures go to the folder OUT (runs/gpu); one summary is printed last.
#
#     SEQPAR_DATA=... benchmarks/gpu_all.sh
#
# Peers and packages that are not installed are looked for in .peers/ (pip install --target .peers --no-deps
# liger-kernel cut-cross-entropy datasets dill multiprocess). Peers found in neither place are left out, with the reason.
set -uo pipefail
cd "$(dirname "$0")/.."
OUT="${OUT:-runs/gpu}"
PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
mkdir -p "$OUT"
export PYTHONPATH=".:.peers${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -c 'import sys, torch; torch.cuda.is_available() or sys.exit("gpu_all: torch sees no CUDA device here")' || exit 1

step() {  # arguments: name, seconds it may take, command...
  local name="$1" limit="$2" began=$SECONDS
  shift 2
  echo "[gpu] $name (at most $limit s)" >&2
  timeout --kill-after=10 "$limit" "$@" > "$OUT/$name.log" 2>&1
  echo "$name: exit $? after $((SECONDS - began)) s" | tee -a "$OUT/steps.txt" >&2
}

: > "$OUT/steps.txt"
step tests 170 "$PYTHON" -m pytest -q --maxfail=20 -m gpu tests/seqpar -p no:cacheprovider
step kernel 120 env HYPOTHESIS_PROFILE=dev "$PYTHON" -m pytest -q -m "not gpu" tests/seqpar/kernels/test_row_kernel.py \
  tests/seqpar/kernels/test_score_kernel.py -p no:cacheprovider
step loss 190 "$PYTHON" -m benchmarks.loss gpu --out "$OUT/loss-cuda.json"
step scores 70 "$PYTHON" -m benchmarks.scores.gpu
step rows 40 "$PYTHON" -m benchmarks.chunk_rows --device cuda
step training 90 "$PYTHON" -m benchmarks.gpu_training --steps 120

echo
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2> /dev/null
"$PYTHON" -c 'import torch, triton; print(f"torch {torch.__version__}, triton {triton.__version__}")'
cat "$OUT/steps.txt"
grep -hE "^(FAILED|ERROR)|passed|failed" "$OUT/tests.log" "$OUT/kernel.log"
grep -h "^|" "$OUT/rows.log" "$OUT/training.log"
grep -hE "^(\||- )" "$OUT/scores.log"
"$PYTHON" - "$OUT/loss-cuda.json" <<'EOF'
import json, sys
from pathlib import Path
from benchmarks.loss import gpu
path = Path(sys.argv[1])
entries = list(json.loads(path.read_text())["parts"].get("gpu", {}).values()) if path.exists() else []
print("\n".join(gpu.table(entries)) if entries else "the loss was not measured; see loss.log")
EOF
