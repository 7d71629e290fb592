"""Manifests and scripts on the pages can at least be read."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
SNIPPETS = [
    pytest.param(language, text, id=f"{page.stem}-{language}-{i}")
    for page in PAGES
    for i, (language, text) in enumerate(re.findall(r"^```(bash|yaml)\n(.*?)^```", page.read_text(), re.M | re.S))
]


@pytest.mark.parametrize(("language", "text"), SNIPPETS)
def test_a_snippet_can_be_read(language: str, text: str) -> None:
    if language == "bash":
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)
        return
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[test]'")
    for document in yaml.safe_load_all(text):
        assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()


def test_the_manifest_runs_the_script_on_hosts_with_an_interface() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -e '.[test]'")
    page = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text()
    (manifest,) = (yaml.safe_load(text) for text in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S))
    trainer = manifest["spec"]["trainer"]
    assert (ROOT / trainer["args"][0]).exists()
    assert trainer["numNodes"] == 2
    assert {each["name"]: each["value"] for each in trainer["env"]}["GLOO_SOCKET_IFNAME"] == "eth0"
    patches = manifest["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patches[0]["template"]["spec"]["template"]["spec"]
    assert {volume["name"] for volume in pod["volumes"]} == {
        mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]
    }
