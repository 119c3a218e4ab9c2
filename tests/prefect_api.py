"""Requests to the Prefect server that `specrl` starts."""

from __future__ import annotations

import base64
import json
import os
import urllib.request
from typing import Any

from flows.server import PASSWORD


def request(url: str, body: dict[str, Any]) -> urllib.request.Request:
    password = base64.b64encode(os.environ[PASSWORD].encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {password}"}
    return urllib.request.Request(url, json.dumps(body).encode(), headers)
