"""Generate the option tables of `finetune convert` from the wheels of the tools; `--check` compares them.

The wheels are downloaded without dependencies and read as syntax trees; no module is imported (decisions/606).
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "operator" / "finetune_convert" / "tables"
GENERATED = "by tools/option_tables.py from the syntax trees of {wheels}; do not edit"
REQUIRED = "required"
SAME_ID = "="  # the id on the Hugging Face Hub is the same


@dataclass(frozen=True)
class TableSource:
    """Where a table comes from: the wheels, and the class of options of each command."""

    wheels: tuple[str, ...]  # the first is the tool, the others contain base classes
    commands: Mapping[str, tuple[str, ...]]  # command -> classes as module:class; the first command is the base
    catalogue: str = ""  # folder of the tool with registered models and datasets


SOURCES = {
    "swift-2": TableSource(
        ("ms-swift==2.6.1", "transformers==4.46.3"),
        {
            name: (f"swift.llm.utils.argument:{cls}",)
            for name, cls in (("sft", "SftArguments"), ("pt", "PtArguments"), ("rlhf", "RLHFArguments"))
        },
        "swift/llm",
    ),
    "swift-3": TableSource(
        ("ms-swift==3.12.6", "transformers==4.57.6"),
        {
            "sft": ("swift.llm.argument.train_args:TrainArguments",),
            "pt": ("swift.llm.argument.train_args:TrainArguments",),
            "rlhf": ("swift.llm.argument.rlhf_args:RLHFArguments",),
        },
        "swift/llm",
    ),
    "swift-4": TableSource(
        ("ms-swift==4.6.0", "transformers==5.19.0"),
        {
            "sft": ("swift.arguments.sft_args:SftArguments",),
            "pt": ("swift.arguments.pretrain_args:PretrainArguments",),
            "rlhf": ("swift.arguments.rlhf_args:RLHFArguments",),
        },
        "swift",
    ),
    "llamafactory": TableSource(
        ("llamafactory==0.9.5", "transformers==5.6.0"),
        {
            "train": tuple(
                f"llamafactory.hparams.{module}:{cls}"
                for module, cls in (
                    ("model_args", "ModelArguments"),
                    ("data_args", "DataArguments"),
                    ("training_args", "TrainingArguments"),
                    ("finetuning_args", "FinetuningArguments"),
                    ("generating_args", "GeneratingArguments"),
                )
            )
        },
    ),
    "axolotl": TableSource(("axolotl==0.19.0",), {"train": ("axolotl.utils.schemas.config:AxolotlInputConfig",)}),
}


def main() -> int:
    """Write or check all tables; return exit code 1 if `--check` found an outdated one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    parser.add_argument("--wheels", type=Path, help="folder with downloaded wheels (default: download them)")
    arguments = parser.parse_args()
    outdated = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, source in SOURCES.items():
            tree = SourceTree(unpack(source.wheels, arguments.wheels, Path(scratch)))
            text = render_table(build_table(source, tree))
            path = TABLES / f"{name}.json"
            if not path.exists() or path.read_text() != text:
                outdated += 1
                print(
                    f"{path.relative_to(ROOT)} is out of date" if arguments.check else f"wrote {path.relative_to(ROOT)}"
                )
                if not arguments.check:
                    path.write_text(text)
    return 1 if arguments.check and outdated else 0


def unpack(wheels: tuple[str, ...], cache: Path | None, scratch: Path) -> Path:
    """Download the wheels, unless `cache` contains them, and unpack all into one folder."""
    folder = scratch / "-".join(wheels)
    for wheel in wheels:
        name, _, version = wheel.partition("==")
        downloads = cache or scratch
        pattern = f"{name.replace('-', '_')}-{version}-*.whl"
        if not any(downloads.glob(pattern)):
            options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", downloads)
            subprocess.run((sys.executable, "-m", "pip", "download", *options, wheel), check=True)
        (path,) = downloads.glob(pattern)
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder, [member for member in archive.namelist() if member.endswith((".py", ".json"))])
    return folder


@dataclass
class ParsedOption:
    """One option: type as source text, default, and choices of a Literal."""

    type: str
    default: Any = None
    choices: tuple[Any, ...] = ()
    aliases: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the keys that are set."""
        keys = {
            "aliases": list(self.aliases),
            "choices": list(self.choices),
            "default": self.default,
            "type": self.type,
        }
        return {key: value for key, value in keys.items() if value not in ([], None)}


@dataclass
class SourceTree:
    """Classes of an unpacked wheel, found by following imports without executing them."""

    root: Path
    _modules: dict[str, tuple[Path, ast.Module] | None] = field(default_factory=dict)

    @cached_property
    def packages(self) -> frozenset[str]:
        """Top-level packages in the folder."""
        return frozenset(path.name for path in self.root.iterdir() if path.is_dir())

    def load(self, module: str) -> tuple[Path, ast.Module] | None:
        """Return the path and syntax tree of a module, or None if the wheels do not contain it."""
        if module not in self._modules:
            base = self.root / module.replace(".", "/")
            path = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
            self._modules[module] = (path, ast.parse(path.read_text())) if path else None
        return self._modules[module]

    def find_class(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Return the class and the module that defines it, also if `module` only imports it."""
        loaded = self.load(module)
        if loaded is None:
            return None
        path, tree = loaded
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return module, node
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    found = self.find_class(_resolve_import(module, path, node), alias.name)
                    if found:
                        return found
        return next((found for alias in _list_aliases(tree, name) if (found := self.find_class(module, alias))), None)

    def list_options(self, module: str, name: str) -> dict[str, ParsedOption]:
        """Return the options of a class and its bases; a class overrides its bases, an earlier base a later one."""
        found = self.find_class(module, name)
        if found is None:
            return {}
        module, node = found
        options: dict[str, ParsedOption] = {}
        for base in reversed(node.bases):
            if isinstance(base, ast.Name):
                options.update(self.list_options(module, base.id))
        options.update(_list_own_options(node))
        return options


def _list_aliases(tree: ast.Module, name: str) -> Iterator[str]:
    """Yield the classes that are assigned to a name, such as Base in `Base = TrainingArguments`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and ast.unparse(node.targets[0]) == name:
            yield node.value.id


def _resolve_import(module: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    return ".".join((*package[: len(package) - node.level + 1], *([node.module] if node.module else [])))


def _list_own_options(node: ast.ClassDef) -> Iterator[tuple[str, ParsedOption]]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        name, annotation = statement.target.id, statement.annotation
        is_class_variable = ast.unparse(annotation).startswith(("ClassVar", "typing.ClassVar", "Final"))
        if not name.startswith("_") and name != "model_config" and not is_class_variable:
            default, aliases = _read_default(statement.value)
            yield name, ParsedOption(_shorten(annotation), default, _read_choices(annotation), aliases)


def _shorten(annotation: ast.expr) -> str:
    """Return the type without Annotated and without the choices of Literal."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    if _is_subscript(annotation, "Annotated"):
        annotation = annotation.slice.elts[0]  # type: ignore[attr-defined]
    text = "Literal" if _is_subscript(annotation, "Literal") else ast.unparse(annotation)
    return text if len(text) <= 60 else text[:57] + "..."


def _is_subscript(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith(name)


def _read_choices(annotation: ast.expr) -> tuple[Any, ...]:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    choices: list[Any] = []
    for node in ast.walk(annotation):
        if _is_subscript(node, "Literal"):
            elements = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]  # type: ignore[attr-defined]
            choices += [element.value for element in elements if isinstance(element, ast.Constant)]
    return tuple(choice for choice in choices if choice is not None)


def _read_default(value: ast.expr | None) -> tuple[Any, tuple[str, ...]]:
    """Return default and aliases of a field; a default that is no literal is given as source text."""
    if value is None:
        return REQUIRED, ()
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith(("field", "Field")):
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        aliases = tuple(
            node.value
            for node in ast.walk(keywords.get("validation_alias", keywords.get("alias", ast.Constant(None))))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if "default_factory" in keywords:
            factory = keywords["default_factory"]
            return _evaluate(factory.body if isinstance(factory, ast.Lambda) else ast.Call(factory, [], [])), aliases
        return _evaluate(keywords.get("default", value.args[0] if value.args else ast.Constant(None))), aliases
    return _evaluate(value), ()


def _evaluate(node: ast.expr) -> Any:
    if isinstance(node, ast.Call) and ast.unparse(node) in ("list()", "dict()"):
        return None
    try:
        literal = ast.literal_eval(node)
    except (ValueError, TypeError):
        return f"<{ast.unparse(node)}>"
    return None if literal in ([], {}, "") or literal == [None, None] else literal


def build_table(source: TableSource, tree: SourceTree) -> dict[str, Any]:
    """Return the options of all commands, with the defaults of the first one and deviations of the others."""
    by_command = {
        command: {name: option for cls in classes for name, option in tree.list_options(*cls.split(":")).items()}
        for command, classes in source.commands.items()
    }
    first, *others = by_command
    options: dict[str, dict[str, Any]] = {}
    for command in (first, *others):
        for name, option in by_command[command].items():
            if name not in options:
                options[name] = option.to_json() | ({} if command == first else {"only": [command]})
                continue
            base = options[name]
            if "only" in base and command not in base["only"]:
                base["only"].append(command)
            elif option.default != base.get("default") and command != first:
                base.setdefault("defaults", {})[command] = option.default
    hub_ids = list_hub_ids(tree.root / source.catalogue) if source.catalogue else {}
    return {"generated": GENERATED.format(wheels=", ".join(source.wheels)), "options": options, **hub_ids}


def list_hub_ids(folder: Path) -> dict[str, dict[str, str]]:
    """Return the Hugging Face id of each name and ModelScope id of registered models and datasets."""
    models: dict[str, str] = {}
    datasets: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        constants = _list_constants(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                _add_registration(node, constants, models, datasets)
    for path in sorted(folder.rglob("dataset_info.json")):
        for entry in _list_dataset_entries(json.loads(path.read_text())):
            datasets.update(entry)
    return {
        "datasets": {name: SAME_ID if name == hub else hub for name, hub in datasets.items()},
        "models": {name: SAME_ID if name == hub else hub for name, hub in models.items()},
    }


def _list_constants(tree: ast.Module) -> dict[str, str]:
    """Return the string constants of classes, such as {"ModelType.qwen_7b": "qwen-7b"}."""
    return {
        f"{node.name}.{statement.targets[0].id}": statement.value.value
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.targets[0], ast.Name)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    }


def _add_registration(
    node: ast.Call, constants: Mapping[str, str], models: dict[str, str], datasets: dict[str, str]
) -> None:
    function = ast.unparse(node.func)
    words = [_read_text(argument, constants) for argument in node.args]
    keywords = {keyword.arg: _read_text(keyword.value, constants) for keyword in node.keywords}
    hub = keywords.get("hf_model_id") or keywords.get("hf_dataset_id")
    match function:
        case "Model" if len(words) >= 2 and words[0] and words[1]:
            models[words[0]] = words[1]
        case "register_model" if len(words) >= 2 and words[0] and (hub or words[1]):
            models[words[0]] = str(hub or words[1])
            if words[1] and hub:
                models[words[1]] = hub
        case "register_dataset" if words and words[0]:
            if hub:
                datasets[words[0]] = hub
                if len(words) > 1 and words[1]:
                    datasets[words[1]] = hub
            elif len(words) > 1 and words[1]:
                datasets[words[0]] = words[1]
        case "DatasetMeta" if hub and keywords.get("ms_dataset_id"):
            datasets[str(keywords["ms_dataset_id"])] = hub


def _read_text(node: ast.expr, constants: Mapping[str, str]) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    return constants.get(ast.unparse(node)) if isinstance(node, ast.Attribute) else None


def _list_dataset_entries(content: object) -> Iterator[dict[str, str]]:
    """Yield the ids of a dataset_info.json: an object by name (2.x) or a list of objects."""
    entries = content.items() if isinstance(content, dict) else enumerate(content if isinstance(content, list) else [])
    for name, entry in entries:
        hub = entry.get("hf_dataset_id")
        ids = [name] if isinstance(name, str) else []
        ids += [entry[key] for key in ("dataset_id", "ms_dataset_id") if isinstance(entry.get(key), str)]
        target = hub or (ids[1] if len(ids) > 1 else None)
        if isinstance(target, str):
            yield dict.fromkeys(ids, target)


def render_table(table: Mapping[str, Any]) -> str:
    """Return the table as JSON with one line per entry, sorted by name."""
    parts = [f'"generated": {json.dumps(table["generated"])}']
    for section in ("options", "models", "datasets"):
        entries = table.get(section, {})
        lines = ",\n".join(
            f"{json.dumps(name)}: {json.dumps(entries[name], ensure_ascii=False, sort_keys=True)}"
            for name in sorted(entries)
        )
        if entries:
            parts.append(f'"{section}": {{\n{lines}\n}}')
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    sys.exit(main())
