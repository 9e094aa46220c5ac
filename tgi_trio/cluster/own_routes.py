"""The front's own routes: health, metrics (its own and its replicas'), and its list of replicas."""

from __future__ import annotations

import hmac
from typing import Final

import orjson
import trio

from tgi_trio.cluster.exchange import AnswerTooLarge
from tgi_trio.cluster.fleet import Fleet, Replica
from tgi_trio.cluster.metrics_view import label_series
from tgi_trio.cluster.replica_http import ReplicaLost, check_address, request_bytes
from tgi_trio.router.telemetry.metrics import CONTENT_TYPE, Metrics

_METRICS: Final = request_bytes(b"GET", b"/metrics", [], b"")
_METRICS_SECONDS: Final = 5.0  # timeout for one replica's metrics
_METRICS_AT_ONCE: Final = 32  # replicas that are asked concurrently
_JSON: Final = b"application/json"

REPLICAS: Final = "/cluster/replicas"

OwnAnswer = tuple[int, bytes, bytes]  # status, content type, body


class OwnRoutes:
    """The routes that the front answers without a replica."""

    def __init__(self, fleet: Fleet, metrics: Metrics, secret: bytes) -> None:
        """`secret`: a request with it in `x-tgi-front` may add and remove replicas."""
        self._fleet = fleet
        self._metrics = metrics
        self._secret = secret

    async def answer(
        self, method: str, path: str, headers: dict[bytes, bytes], body: bytes
    ) -> OwnAnswer | None:
        """Return the answer; None if the route is the replicas'."""
        match method, path:
            case "GET" | "HEAD", "/live":
                return 200, _JSON, b'{"live":true}'
            case "GET" | "HEAD", "/health":
                return (200 if self._fleet.healthy else 503), _JSON, b""
            case "GET" | "HEAD", "/ready":
                return self._ready()
            case "GET" | "HEAD", "/metrics":
                return 200, CONTENT_TYPE.encode(), self._metrics.render()
            case "GET" | "HEAD", "/metrics/replicas":
                return 200, CONTENT_TYPE.encode(), await self._metrics_of_replicas()
            case _, "/cluster/replicas":
                return self._administer(method, headers.get(b"x-tgi-front", b""), body)
        return None

    def _ready(self) -> OwnAnswer:
        if self._fleet.healthy:
            return 200, _JSON, orjson.dumps({"ready": True, **self._differing()})
        return 503, _JSON, b'{"ready":false,"why":"no replica is up"}'

    def _differing(self) -> dict[str, dict[str, str]]:
        differing = self._fleet.differing
        return {"differing": differing} if differing else {}

    # ---- replicas by name -----------------------------------------------------------------------

    def _administer(self, method: str, secret: bytes, body: bytes) -> OwnAnswer:
        """List the replicas, or change them: `{"add": ["host:port"], "remove": [...]}`."""
        if not self._secret:
            return _refusal(403, "the front has no --cluster-secret-file: its replicas stay")
        if not hmac.compare_digest(secret, self._secret):
            return _refusal(403, "send the cluster's secret as x-tgi-front")
        if method == "POST":
            try:
                added, removed = _read_change(body)
            except ValueError as error:
                return _refusal(422, str(error))
            for name in removed:
                self._fleet.dismiss(name)
            for name in added:
                self._fleet.name(name)
        elif method not in ("GET", "HEAD"):
            return _refusal(405, f"{REPLICAS} answers GET and POST")
        states = {each.name: each.state.value for each in self._fleet.members}
        return 200, _JSON, orjson.dumps({"replicas": states, **self._differing()})

    # ---- metrics --------------------------------------------------------------------------------

    async def _metrics_of_replicas(self) -> bytes:
        """Return the metrics of all replicas that answer, with a label `replica` in each series."""
        found: dict[str, bytes] = {}
        room = trio.CapacityLimiter(_METRICS_AT_ONCE)

        async def fetch(replica: Replica) -> None:
            async with room:
                text = await self._metrics_of(replica)
            if text is not None:
                found[replica.name] = text

        async with trio.open_nursery() as nursery:
            for replica in self._fleet.replicas:
                nursery.start_soon(fetch, replica)
        return label_series(dict(sorted(found.items())))

    async def _metrics_of(self, replica: Replica) -> bytes | None:
        exchange = replica.exchange()
        try:
            with trio.move_on_after(_METRICS_SECONDS):
                head = await exchange.ask(_METRICS)
                text = await exchange.rest()
                return text if head.status == 200 else None
        except (ReplicaLost, AnswerTooLarge):
            return None  # why is seen from its state, which is among the front's own metrics
        finally:
            exchange.close()
        return None


def _read_change(body: bytes) -> tuple[list[str], list[str]]:
    """Return the addresses to add and to remove. Raises ValueError that says what is allowed."""
    try:
        change = orjson.loads(body)
    except ValueError:
        change = None
    if not isinstance(change, dict) or change.keys() - {"add", "remove"}:
        raise ValueError('expected {"add": ["host:port"], "remove": ["host:port"]}')
    lists = change.get("add", []), change.get("remove", [])
    for names in lists:
        if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
            raise ValueError("add and remove are lists of addresses such as host:port")
        for each in names:
            check_address(each)
    return lists


def _refusal(status: int, why: str) -> OwnAnswer:
    return status, _JSON, orjson.dumps({"error": why, "error_type": "cluster"})
