#!/usr/bin/env bash
# Every measurement of a whole engine on a GPU machine, each in a JSON file of its own:
#   benchmarks/on_gpu.sh OUT MINUTES SMOLLM2 [0.6B [4B]]
# SMOLLM2, 0.6B, 4B: complete artifacts for this device (edgebuild build; benchmarks/shape_artifacts.py). A soak of
# MINUTES (0 = none) runs on GPU 0 beside the rest, which takes the last GPU; with one GPU the soak comes last.
# QUICK=1: one repeat of each, about two minutes a model. EDGEBUILD_COMMIT: for a copy without its history.
set -u
OUT=${1:?usage: on_gpu.sh OUT MINUTES SMOLLM2 [0.6B [4B]]}; MINUTES=${2:?}; SMOLLM2=${3:?}; MIDDLE=${4:-}; LARGE=${5:-}
cd "$(dirname "$0")/.." && mkdir -p "$OUT"
export PYTHONPATH=${PYTHONPATH:-}:builder:runtime:tests:benchmarks PYTHONUNBUFFERED=1
GPUS=$(nvidia-smi -L | wc -l); BEGAN=$(date +%s)
ABLATION="--requests 6 --repeats 3"; ROUNDS="--rounds 3"; REQUESTS=64
[ -n "${QUICK:-}" ] && ABLATION="--requests 3 --repeats 1" ROUNDS="--rounds 1" REQUESTS=16

run() { # NAME SECONDS COMMAND...: at most so long; its output in OUT/NAME.log, its end here
  local name=$1 limit=$2 began status; shift 2; began=$(date +%s)
  timeout "$limit" "$@" > "$OUT/$name.log" 2>&1; status=$?
  echo "[$(( $(date +%s) - BEGAN )) s] $name: status $status, $(( $(date +%s) - began )) s: $(tail -n 1 "$OUT/$name.log" | cut -c1-200)"
}
bench() { # NAME SECONDS SCRIPT OPTIONS...
  local name=$1 limit=$2 script=$3; shift 3
  run "$name" "$limit" python3 "benchmarks/$script.py" "$@" --output "$OUT/$name.json"
}
soak() { CUDA_VISIBLE_DEVICES=0 bench soak-smollm2 $(( ${MINUTES%.*} * 60 + 300 )) soak --artifact "$SMOLLM2" --minutes "$MINUTES"; }

export CUDA_VISIBLE_DEVICES=$(( GPUS - 1 ))
run start-cold 200 python3 -m edgert.cli generate "$SMOLLM2" --chat "What is the capital of France?" --max-tokens 32 --json
[ "$MINUTES" != 0 ] && [ "$GPUS" -gt 1 ] && { soak & }
run start-warm 100 python3 -m edgert.cli generate "$SMOLLM2" --chat "What is the capital of France?" --max-tokens 32 --json
run doctor-smollm2 100 python3 -m edgert.cli doctor "$SMOLLM2"
EDGERT_TEST_ARTIFACT=$SMOLLM2 run tests 300 python3 -m pytest -v -s -p no:cacheprovider tests/gpu/test_smollm2.py tests/gpu/test_engine.py
bench ablation-smollm2 200 ablation --artifact "$SMOLLM2" --prompt 1000 $ABLATION
bench requests-smollm2 200 measured_requests --artifact "$SMOLLM2" --traffic profiles/traffic/azure-conv-2023.yaml --requests $REQUESTS
bench prefill-smollm2 100 prefill --artifact "$SMOLLM2" --name smollm2 --chunk 1024 --lengths 512 1024 4096
bench interleaving-smollm2 150 interleaving --artifact "$SMOLLM2" --prompt 7000 --chunk 440 $ROUNDS
for pair in "0.6b=$MIDDLE" "4b=$LARGE"; do
  name=${pair%%=*}; artifact=${pair#*=}
  [ -n "$artifact" ] || continue
  bench "prefill-$name" 250 prefill --artifact "$artifact" --name "$name"
  run "doctor-$name" 150 python3 -m edgert.cli doctor "$artifact"
  [ "$name" = 0.6b ] && bench interleaving-0.6b 250 interleaving --artifact "$artifact" --prompt 16000 $ROUNDS
  bench "ablation-$name" 350 ablation --artifact "$artifact" --prompt 3584 $ABLATION
done
[ "$MINUTES" != 0 ] && [ "$GPUS" -le 1 ] && soak
wait
