"""A Ray cluster of real nodes on loopback: `python ray_nodes.py FOLDER PORT NODES`.

Prints a line when it is ready and after each command of its input: "kill N" ends node N by SIGKILL,
0 being the head, and "add N" starts it anew. The cluster ends with the input.
"""

import os
import socket
import sys
from contextlib import ExitStack

os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_TMPDIR=sys.argv[1],
    RAY_agent_register_timeout_ms="300000",  # on a machine with much else to do
    RAY_worker_register_timeout_seconds="300",
    RAY_worker_niceness="0",
    RAY_USAGE_STATS_ENABLED="0",
)

from ray.cluster_utils import Cluster  # Ray reads the environment when it is imported

TRIES = 5
AGENTS = (
    *("metrics_agent_port", "metrics_export_port"),
    *("dashboard_agent_listen_port", "runtime_env_agent_port"),
)


def find_ports(taken: int) -> dict[str, int]:
    """Return a free port for each agent, no two the same and none of them `taken`."""
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < len(AGENTS):
            free = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            if (port := free.getsockname()[1]) != taken:
                ports.append(port)
    return dict(zip(AGENTS, ports, strict=True))


def serve(port: int, count: int) -> None:
    """Start the nodes, each with one CPU and an address of its own, and obey."""
    os.makedirs(os.path.join(os.environ["RAY_TMPDIR"], "ray"))
    cluster = Cluster()
    nodes = {}

    def add(number: int) -> None:
        head = (
            {"gcs_server_port": port, "include_dashboard": False, "no_monitor": True}
            if number == 0
            else {}
        )
        for left in reversed(range(1 if head else TRIES)):
            try:
                nodes[number] = cluster.add_node(
                    wait=False,
                    node_ip_address=f"127.0.0.{number + 2}",
                    num_cpus=1,
                    num_gpus=0,
                    object_store_memory=80_000_000,
                    include_log_monitor=False,
                    **find_ports(port),
                    **head,
                )
                return
            except Exception:  # Ray gives its processes some seconds to start, and no more
                if not left:
                    raise

    for number in range(count):
        add(number)
    print("ready", flush=True)
    for line in sys.stdin:
        command, number = line.split()
        if command == "kill":
            nodes[int(number)].kill_all_processes(check_alive=False, allow_graceful=False)
        else:
            if number == "0":
                cluster = Cluster()
            add(int(number))
        print("done", flush=True)
    for node in nodes.values():
        node.kill_all_processes(check_alive=False, allow_graceful=False)


if __name__ == "__main__":
    serve(int(sys.argv[2]), int(sys.argv[3]))
