"""A Ray cluster of several nodes on this machine, as a program: `python -m tests.fleet.nodes PORT NODES`.

It prints the cluster's address as JSON, and obeys lines of its input, each answered by a line: `deploy [FLEET, SERVER]`
deploys a fleet with these settings, as JSON; `delete` removes it; `kill` ends the last node without warning, and `add`
adds one. Each has room for one engine. At the end of its input it ends all.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.config import HTTPOptions, ProxyLocation

import quire.fleet.application as fleets
from quire.fleet.config import FleetConfig
from quire.fleet.deployments import APPLICATION, deployments
from quire.serve.config import ServerConfig

_KINDS = (FleetConfig, ServerConfig)
_HEAD = "head"


def _on_head(fleet: FleetConfig, server: ServerConfig) -> dict[str, dict[str, Any]]:
    """The deployments, with the ingress where no test kills it."""
    found = deployments(fleet, server)
    found["Ingress"]["ray_actor_options"]["resources"] = {_HEAD: 0.01}
    return found


def main() -> None:
    """Run until the input ends."""
    port, number = map(int, sys.argv[1:])
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "resources": {_HEAD: 1}})
    fleets.deployments = _on_head
    nodes = [cluster.add_node(num_cpus=1) for _ in range(number - 1)]
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        verb, _, more = line.strip().partition(" ")
        if verb == "deploy":
            fleet, server = (kind.read(given) for kind, given in zip(_KINDS, json.loads(more), strict=True))
            serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host="127.0.0.1", port=port))
            serve.run_many([serve.RunTarget(fleets.application(fleet, server, listens=False), name=APPLICATION)])
        elif verb == "delete":
            serve.delete(APPLICATION)
        elif verb == "kill":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        elif verb == "add":
            nodes.append(cluster.add_node(num_cpus=1))
        print(json.dumps("done"), flush=True)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
