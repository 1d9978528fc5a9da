"""Commands of the collector: `tidegate collect`, `tidegate collect keys add|list|revoke`."""

import sys
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from pipelines.terminal import Common, run

if TYPE_CHECKING:
    from pipelines.collector_keys import Key

app = App(name="collect", help="Take session events over HTTP: native JSON, and OpenTelemetry traces and logs as JSON.")
keys = App(name="keys", help="Who may send events, and what a key's holder may say of itself.")
app.command(keys)


@app.default
def collect(*, common: Common = Common()) -> int:
    """Take events at collector.host:collector.port until a signal (SIGINT, SIGTERM), and put them on Kafka.

    POST /v1/events takes events of this project; /v1/traces and /v1/logs take OTLP/JSON, so that OTEL_EXPORTER_OTLP_ENDPOINT can
    name this address. While there are no keys, only requests from this machine are taken. Events wait on disk while Kafka is away.
    """
    import asyncio

    from pipelines.collector_serve import serve
    from pipelines.config import PipelinesConfig

    def announce(url: str) -> None:
        print(f"the collector takes events at {url}; stop it with Ctrl-C", file=sys.stderr, flush=True)

    asyncio.run(serve(common.tree(PipelinesConfig), common.place(), announce=announce))
    return 0


@keys.command
def add(
    name: str,
    *,
    origin: Annotated[
        Literal["live", "simulated", "benchmark", "imported"], Parameter(help="Where its sessions come from; events cannot claim another.")
    ] = "live",
    consent: Annotated[Literal["train", "measure", "none"], Parameter(help="The most that its events may claim.")] = "measure",
    namespace: Annotated[
        str | None,
        Parameter(help="Its users are told apart from those of other name spaces; default: the key's name. Empty: the gateway's users."),
    ] = None,
    tokens: Annotated[
        bool, Parameter(negative="", help="Believe its token ids and log-probabilities: only where tokens are sampled, for training.")
    ] = False,
    common: Common = Common(),
) -> int:
    """Make a key and show it, once."""
    from pipelines import collector_keys

    home, now_ms = common.place(), int(time.time() * 1000)
    key = collector_keys.add(home, name, origin=origin, consent=consent, namespace=namespace, tokens=tokens, now_ms=now_ms)
    common.show({"name": name, "key": key}, lambda: f"{key}\nThis is shown once. Clients send it as `Authorization: Bearer {key[:8]}...`")
    return 0


@keys.command(name="list")
def list_(*, common: Common = Common()) -> int:
    """Show the keys, without the keys."""
    from pipelines import collector_keys

    found = collector_keys.read(common.place())
    rows = [key.model_dump(mode="json", exclude={"sha256"}) for key in found]
    common.show({"keys": rows}, lambda: "\n".join(map(_line, found)) or "no keys; requests from this machine are taken without")
    return 0


@keys.command
def revoke(name: str, *, common: Common = Common()) -> int:
    """Refuse a key from now on; a running collector follows within one request."""
    from pipelines import collector_keys

    key = collector_keys.revoke(common.place(), name, now_ms=int(time.time() * 1000))
    common.show(key.model_dump(mode="json", exclude={"sha256"}), lambda: _line(key))
    return 0


def _line(key: "Key") -> str:
    ended = "" if key.revoked_at_ms is None else f", revoked {_day(key.revoked_at_ms)}"
    trusted = ", token ids believed" if key.tokens else ""
    space = f", users of {key.namespace}" if key.namespace else ", users of the gateway"
    return f"{key.name}: origin {key.origin}, consent at most {key.consent}{space}{trusted}, made {_day(key.created_at_ms)}{ended}"


def _day(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M")


if __name__ == "__main__":
    sys.exit(run(app))
