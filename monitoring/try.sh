#!/usr/bin/env bash
# A real Prometheus scrapes examples/metrics.py with the alerts of this folder; then every query of the dashboard is asked.
# Needs prometheus and promtool (apt-get install prometheus), and prometheus_client in the Python: PYTHON=... monitoring/try.sh
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
free_port() { "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port=$(free_port) web=$(free_port)
promtool check rules monitoring/alerts.yml
"$python" examples/metrics.py --port "$port" >"$folder/example.log" &
cat >"$folder/prometheus.yml" <<YAML
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: ["$PWD/monitoring/alerts.yml"]
scrape_configs:
  - job_name: kvswap
    static_configs: [{targets: ["127.0.0.1:$port"]}]
YAML
promtool check config "$folder/prometheus.yml"
prometheus --config.file="$folder/prometheus.yml" --storage.tsdb.path="$folder/data" \
  --web.listen-address="127.0.0.1:$web" --log.level=error &
sleep "${SECONDS_TO_SCRAPE:-15}"
"$python" monitoring/ask.py "http://127.0.0.1:$web"
