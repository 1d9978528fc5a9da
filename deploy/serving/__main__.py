"""The verb `serve`: the gateway and its replicas in the foreground."""

import asyncio
import json
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from pipelines.errors import ConfigError
from pipelines.storage import exclusive
from pipelines.terminal import Common, progress, run

app = App(name="serve", help="Serve the ledger's checkpoint over OpenAI's API and record what it does.")


@app.default
def serve(
    *,
    port: Annotated[int | None, Parameter(help="Port; 0 takes a free one. Default: serving.port.")] = None,
    pin: Annotated[Path | None, Parameter(help="Serve this checkpoint folder instead of the ledger's pointer.")] = None,
    policy_version: Annotated[int | None, Parameter(help="With --pin: the policy version to stamp on completions.")] = None,
    arm: Annotated[str, Parameter(help="With --pin: the arm to stamp on completions: candidate, anchor, none.")] = "candidate",
    state: Annotated[Path | None, Parameter(help="Write {url, pid} here. Default: run/gateway.json, and nothing with --pin.")] = None,
    common: Common = Common(),
) -> None:
    """Serve until interrupted.

    The API keys are TIDEGATE_API_KEYS (comma-separated), or one local key made at first start in keys/gateway.key.
    """
    from deploy.config import Config
    from deploy.serving.serve import STATE, follow_ledger, pinned
    from deploy.serving.serve import serve as run_gateway

    config, home = common.tree(Config), common.place()
    if port is not None:
        if not 0 <= port <= 65535:
            raise ConfigError(f"--port {port}: a port lies between 0 and 65535")
        config = config.model_copy(update={"serving": config.serving.model_copy(update={"port": port})})
    if pin is None and policy_version is not None:
        raise ConfigError("--policy-version goes with --pin; without it the ledger says which version serves")
    if pin is not None and policy_version is None:
        raise ConfigError("--pin needs --policy-version: completions must say which policy sampled them")
    source = follow_ledger(home) if pin is None else pinned(pin, policy_version=policy_version or 0, arm=arm)
    where = state or (home.run / STATE if pin is None else None)
    alone = exclusive(home.run / "gateway.lock", what="the gateway") if pin is None else nullcontext()

    with alone, ExitStack() as starting:
        starting.enter_context(progress("starting the engine"))

        def announce(url: str) -> None:
            starting.close()
            print(json.dumps({"url": url}) if common.json else f"serving on {url}/v1", flush=True)

        asyncio.run(run_gateway(source, config=config, home=home, state=where, announce=announce))


if __name__ == "__main__":
    sys.exit(run(app))
