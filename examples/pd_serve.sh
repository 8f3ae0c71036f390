#!/usr/bin/env bash
# Prefill and decode servers of one tiny model and a proxy in front of them, all on this host; then asks them.
# Another model: MODEL=... SERVE="--dtype bfloat16" examples/pd_serve.sh. PyPI's router: ROUTER=.../vllm-router
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
export PYTHONPATH="$PWD:$PWD/transports${PYTHONPATH:+:$PYTHONPATH}"
work=$(mktemp -d)
pids=()
trap 'for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; wait; rm -rf "$work"' EXIT
port=${PORT:-8100} # and the two above it
serve=(${SERVE:---load-format dummy --dtype float32 --enforce-eager --block-size 32 --max-model-len 1024})
if [ -z "${MODEL:-}" ]; then
  MODEL=$work/model
  python examples/tiny_chat_model.py "$MODEL"
fi
if ! python -c 'import torch; exit(not torch.cuda.is_available())'; then
  export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} TORCHDYNAMO_DISABLE=1
fi

start() { # role, port
  python -m vllm.entrypoints.openai.api_server --model "$MODEL" --host 127.0.0.1 --port "$2" --served-model-name tiny "${serve[@]}" --kv-transfer-config \
    "{\"kv_connector\": \"KvRdmaConnector\", \"kv_connector_module_path\": \"kvrdma.connector\", \"kv_role\": \"$1\"}" \
    >"$work/$1.log" 2>&1 &
  pids+=($!)
}
start kv_producer $((port + 1))
start kv_consumer $((port + 2))
for each in 1 2; do
  until curl -sf "http://127.0.0.1:$((port + each))/health"; do
    kill -0 "${pids[$((each - 1))]}" || { cat "$work"/*.log && exit 1; }
    sleep 1
  done
done
prefill=http://127.0.0.1:$((port + 1)) decode=http://127.0.0.1:$((port + 2))
if [ -n "${ROUTER:-}" ]; then
  "$ROUTER" --vllm-pd-disaggregation --prefill "$prefill" --decode "$decode" --host 127.0.0.1 --port "$port" >"$work/router.log" 2>&1 &
else
  python examples/pd_proxy.py "$port" "$prefill" "$decode" &
fi
pids+=($!)
until (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do sleep 0.2; done

ask() { # text
  echo "== ${#1} characters"
  curl -sN "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' -d \
    "{\"model\": \"tiny\", \"stream\": true, \"max_tokens\": 8, \"temperature\": 0, \"ignore_eos\": true,
      \"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}" | tail -n 3
}
long=$(printf 'All KV caches are read from where they were computed. %.0s' 1 2 3 4 5 6 7 8)
ask hi       # shorter than a block
ask "$long"  # nothing of it is here
ask "$long"  # all of it is here
ask "$long And this is new." # most of it is here
echo "== counted by the decode server"
curl -s "http://127.0.0.1:$((port + 2))/metrics" | grep -E '^vllm:kvrdma_(pull_seconds_count|pull_bytes_sum|tokens_loaded|requests_(loaded|declined)|pull_failures)'
