"""Asks a Prometheus every query of the dashboard: python monitoring/ask.py http://127.0.0.1:9090. Exit status 1: one is
refused, the targets are down, an alert fires, or a query about transfers finds nothing."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any


def ask(base: str, path: str, **values: str) -> Any:
    try:
        with urllib.request.urlopen(f"{base}/api/v1/{path}?{urllib.parse.urlencode(values)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"refused: {values}: {error.read().decode()}") from None


def main(base: str) -> int:
    board = json.loads((Path(__file__).parent / "grafana-dashboard.json").read_text())
    down = [each["scrapeUrl"] for each in ask(base, "targets")["activeTargets"] if each["health"] != "up"]
    empty, asked = [], 0
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"]
            for name, value in (("__rate_interval", "10s"), ("__range", "1m"), ("job", ".*")):
                query = query.replace(f"${name}", value)
            query = query.replace("$rank", ".*").replace("$device", ".*")
            result, asked = ask(base, "query", query=query)["result"], asked + 1
            if not result and panel["title"] in ("Speed by direction and path", "Duration (p50, p99)", "Memory"):
                empty.append(panel["title"])
            print(f"{panel['title']:<32} {len(result):>3} series  {[row['value'][1] for row in result][:2]}")
    firing = [each["labels"]["alertname"] for each in ask(base, "alerts")["alerts"] if each["state"] == "firing"]
    print(f"{asked} queries; down: {down or 'none'}; empty: {empty or 'none'}; firing: {firing or 'none'}")
    return 1 if down or empty or firing or not asked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
