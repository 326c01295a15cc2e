"""Write what is made from the models: CRD, chart's copy, JSON schema. `--check` only says what is out of date."""

import argparse
import json
import sys
from pathlib import Path

import yaml

from finetune_api.crd import build_crd, build_json_schema

ROOT = Path(__file__).resolve().parent.parent
NOTE = "Generated from operator/finetune_api by `make generate`; do not edit."


def render_files() -> dict[Path, str]:
    """Every generated file by its path from the root."""
    crd = f"# {NOTE}\n" + dump_yaml(build_crd())
    schema = json.dumps({"$comment": NOTE, **build_json_schema()}, indent=1, ensure_ascii=False)
    return {
        Path("manifests/crd/finetunejobs.yaml"): crd,
        Path("manifests/finetunejob.schema.json"): schema.replace("{\n", "{", 1) + "\n",
    }


class _PlainDumper(yaml.SafeDumper):
    """Writes what is the same twice out twice: anchors are hard on readers of a diff."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 (PyYAML's signature)
        return True


def dump_yaml(document: object) -> str:
    """YAML in the order of the document."""
    return yaml.dump(document, Dumper=_PlainDumper, sort_keys=False, width=110, allow_unicode=True)


def main() -> int:
    """Exit code 1 if --check found a file that is not what the models say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    stale = {path: text for path, text in render_files().items() if _read(ROOT / path) != text}
    for path, text in stale.items():
        print(f"{path} is out of date; run `make generate`" if check else f"wrote {path}")
        if not check:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    return 1 if check and stale else 0


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
