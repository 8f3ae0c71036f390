#!/usr/bin/env bash
# Prefill and decode servers of one tiny model and a proxy in front of them, all on this host; then asks them.
# It takes about a minute, in an environment that has vLLM and kvrdma: the active one, or else this folder's .venv after
# `scripts/setup dev`. Another model: MODEL=... SERVE="--dtype bfloat16" examples/pd_serve.sh. PyPI's router in place of
# examples/pd_proxy.py: ROUTER=.../vllm-router. PORT=8100 is the proxy's; the servers have the two above it.
set -euo pipefail
case " $* " in *" -h "* | *" --help "*) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && exit ;; esac
here=$(cd "$(dirname "$0")" && pwd)
say() { echo "pd_serve: $*" >&2; }

work=$(mktemp -d)
pids=()
trap 'for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done; wait; rm -rf "$work"' EXIT
cd "$work" # from the source tree Python would import that instead of the kvrdma that is installed

lacks() { # interpreter: says what it lacks, nothing if it has all
  "$1" - <<'PYTHON' 2>&1
import importlib, importlib.util
for name in ("vllm", "tokenizers", "kvrdma", "kvrdma_cma._cma"):
    try:
        if name == "vllm" and importlib.util.find_spec(name):
            continue  # importing it takes long
        importlib.import_module(name)
    except ImportError as error:
        print(f"  {error}")
PYTHON
}
python=$(command -v "${PYTHON:-python}" || command -v python3 || true)
missing=$([ -z "$python" ] && echo "  there is no python" || lacks "$python" || true)
if [ -n "$missing" ] && [ -x "$here/../.venv/bin/python" ] && [ -z "$(lacks "$here/../.venv/bin/python" || true)" ]; then
  python=$(cd "$here/../.venv/bin" && pwd)/python missing=
  say "${PYTHON:-python} lacks vLLM or kvrdma: using $python"
fi
if [ -n "$missing" ]; then
  say "$python cannot run this:"
  echo "$missing" >&2
  say "activate an environment that has vLLM and install kvrdma there (README.md, 'Use it in vLLM'), or run scripts/setup dev"
  exit 2
fi

port=${PORT:-8100}
read -ra serve <<<"${SERVE:---load-format dummy --dtype float32 --enforce-eager --block-size 32 --max-model-len 1024}"
if [ -z "${MODEL:-}" ]; then
  MODEL=$work/model
  "$python" "$here/tiny_chat_model.py" "$MODEL"
fi
if ! "$python" -c 'import torch; exit(not torch.cuda.is_available())'; then
  export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
  export VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind} TORCHDYNAMO_DISABLE=1
fi

start() { # role, port
  "$python" -m vllm.entrypoints.openai.api_server --model "$MODEL" --host 127.0.0.1 --port "$2" \
    --served-model-name tiny "${serve[@]}" --kv-transfer-config \
    "{\"kv_connector\": \"KvRdmaConnector\", \"kv_connector_module_path\": \"kvrdma.connector\", \"kv_role\": \"$1\"}" \
    >"$work/$1.log" 2>&1 &
  pids+=($!)
}
alive() { # the last process started, its log
  kill -0 "$1" 2>/dev/null || { cat "$2" >&2 && say "it ended: see above" && exit 1; }
}
say "waiting for two servers, about 40 s"
start kv_producer $((port + 1))
start kv_consumer $((port + 2))
for each in 1 2; do
  until curl -sf -o "$work/health" "http://127.0.0.1:$((port + each))/health"; do
    alive "${pids[0]}" "$work/kv_producer.log"
    alive "${pids[1]}" "$work/kv_consumer.log"
    sleep 1
  done
done
prefill=http://127.0.0.1:$((port + 1)) decode=http://127.0.0.1:$((port + 2))
if [ -n "${ROUTER:-}" ]; then
  "$ROUTER" --vllm-pd-disaggregation --prefill "$prefill" --decode "$decode" --host 127.0.0.1 --port "$port" \
    >"$work/proxy.log" 2>&1 &
else
  "$python" "$here/pd_proxy.py" "$port" "$prefill" "$decode" >"$work/proxy.log" 2>&1 &
fi
pids+=($!)
until (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
  alive "${pids[2]}" "$work/proxy.log"
  sleep 0.2
done

ask() { # text, what of it is where
  curl -sN "http://127.0.0.1:$port/v1/chat/completions" -H 'Content-Type: application/json' -d \
    "{\"model\": \"tiny\", \"stream\": true, \"stream_options\": {\"include_usage\": true}, \"max_tokens\": 8,
      \"temperature\": 0, \"ignore_eos\": true, \"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}" |
    "$python" -c '
import json, sys
said = sys.stdin.read()
try:
    chunks = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
    (reason,) = [c["finish_reason"] for part in chunks for c in part["choices"] if c.get("finish_reason")]
    usage = chunks[-1]["usage"]
except (ValueError, LookupError):
    sys.exit(f"no answer: {said}")
print("{}: {} tokens, {} more made, finished: {}".format(sys.argv[1], *map(usage.get, ("prompt_tokens", "completion_tokens")), reason))
' "$2"
}
long=$(printf 'All KV caches are read from where they were computed. %.0s' 1 2 3 4 5 6 7 8)
ask hi "a prompt shorter than a block"
ask "$long" "a long one, nothing of it here"
ask "$long" "the same again, all of it here"
ask "$long And this is new." "with more at its end, most of it here"
echo "counted by the decode server:"
names='pull_seconds_count|pull_bytes_sum|tokens_loaded_total|requests_(loaded|declined)_total|pull_failures_total'
curl -s "$decode/metrics" | grep -E "^vllm:kvrdma_($names)[{ ]" | sed 's/{[^}]*}//' | tee "$work/counted"
if ! grep -Eq '^vllm:kvrdma_requests_loaded_total [1-9]' "$work/counted"; then
  say "no request was loaded from the prefill server: every prompt was computed twice"
  grep -hE 'WARNING|ERROR' "$work"/kv_*.log | tail -n 20 >&2 || true
  exit 1
fi
