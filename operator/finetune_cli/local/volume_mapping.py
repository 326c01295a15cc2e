"""Where the paths of a job lie on this machine: volumes become the folders that the user names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.pod_types import Volume
from finetune_cli.errors import BadInput
from finetune_cli.job_file import JobFile

Raw = dict[str, Any]


@dataclass(frozen=True)
class Mount:
    """A folder of the pod and what stands in for it here."""

    mount_path: str
    here: Path


def to_local(path: str, mounts: Iterable[Mount]) -> str | None:
    """The path on this machine, by the deepest mount that it lies under; None if it lies under none."""
    given = PurePosixPath(path)
    above = [mount for mount in mounts if given.is_relative_to(mount.mount_path)]
    if not above:
        return None
    mount = max(above, key=lambda mount: len(PurePosixPath(mount.mount_path).parts))
    return str(mount.here / given.relative_to(mount.mount_path))


def parse_volumes(options: Sequence[str], spec: FineTuneJobSpec) -> tuple[Mount, ...]:
    """`--volume NAME=DIR`: DIR is what the trainer would see at the volume's mountPath."""
    known = {volume.name: volume.mount_path for volume in spec.volumes}
    mounts, problems = [], []
    for option in options:
        name, _, folder = option.partition("=")
        if not folder:
            problems.append(f"--volume {option}: expected NAME=DIR, such as data=./data")
        elif name not in known:
            problems.append(f"--volume {name}: the job has no such volume; it has {', '.join(known) or 'none'}")
        elif not Path(folder).is_dir():
            problems.append(f"--volume {name}: {folder} is no folder")
        else:
            mounts.append(Mount(known[name], Path(folder).resolve()))
    if problems:
        raise BadInput(*problems)
    return tuple(mounts)


def localise(file: JobFile, mounts: Sequence[Mount]) -> Raw:
    """The job's body with the paths of model and datasets, or of its command, as they are here. Raises BadInput."""
    here = _Here(file, mounts)
    spec = file.body["spec"]
    if file.job.spec.command is not None:
        command = _localise_command(spec["command"], here)
        if here.problems:
            raise BadInput(*(f"{file.path}: {problem}" for problem in here.problems))
        return {**file.body, "spec": {**spec, "command": command}}
    model = {**spec["model"], "name": here.find_model("spec.model.name", spec["model"]["name"])}
    lora = _localise_lora(spec, here)
    dataset = {**spec["dataset"]}
    for part in ("train", "eval"):
        if part in dataset:
            dataset[part] = [
                {**row, "name": here.find_rows(f"spec.dataset.{part}[{n}].name", row["name"])}
                for n, row in enumerate(dataset[part])
            ]
    if here.problems:
        raise BadInput(*(f"{file.path}: {problem}" for problem in here.problems))
    return {**file.body, "spec": {**spec, **lora, "model": model, "dataset": dataset}}


def _localise_lora(spec: Raw, here: "_Here") -> Raw:
    """Of a job that goes on from an adapter."""
    adapter = (spec.get("lora") or {}).get("adapter")
    return {"lora": {**spec["lora"], "adapter": here.find_model("spec.lora.adapter", adapter)}} if adapter else {}


def _localise_command(command: Raw, here: "_Here") -> Raw:
    """A word that is a path on a volume is that path here; a folder of the image has to be named."""
    words: Raw = {key: [here.map(word) for word in command[key]] for key in ("args", "exec") if key in command}
    script = {"script": here.map(command["script"])} if "script" in command else {}
    folder = here.find("spec.command.workingDir", command.get("workingDir", "."))
    return {**command, **words, **script, "workingDir": folder}


def localise_model(file: JobFile, mounts: Sequence[Mount]) -> Raw:
    """The job's spec with the path of its model as it is on this machine. Raises BadInput."""
    here = _Here(file, mounts)
    spec = file.body["spec"]
    model = {**spec["model"], "name": here.find_model("spec.model.name", spec["model"]["name"])}
    lora = _localise_lora(spec, here)
    if here.problems:
        raise BadInput(*(f"{file.path}: {problem}" for problem in here.problems))
    return {**spec, **lora, "model": model}


class _Here:
    """Finds paths and collects what could not be found."""

    def __init__(self, file: JobFile, mounts: Sequence[Mount]) -> None:
        self._base = file.path.resolve().parent
        self._volumes = file.job.spec.volumes
        self._mounts = mounts
        self.problems: list[str] = []

    def find_model(self, field: str, name: str) -> str:
        """Or an adapter. A name that is no path here is a Hub id, which is the trainer's to find."""
        if name.startswith(("/", "./", "../")) or (self._base / name).exists():
            return self.find(field, name)
        return name

    def map(self, word: str) -> str:
        """The path on this machine, or the word as it is."""
        return to_local(word, self._mounts) or word

    def find_rows(self, field: str, name: str) -> str:
        """`path#1000` is 1000 rows of the path."""
        path, sign, number = name.partition("#")
        return f"{self.find(field, path)}{sign}{number}"

    def find(self, field: str, path: str) -> str:
        found = to_local(path, self._mounts) or str(self._base / path)
        volume = self._volume_of(path)
        if volume is not None and volume.mount_path not in {mount.mount_path for mount in self._mounts}:
            self.problems.append(f"{field}: {path} is on volume {volume.name}; add --volume {volume.name}=DIR")
        elif not Path(found).exists():
            self.problems.append(f"{field}: {path}: no such file or folder" + (f" ({found})" if found != path else ""))
        return found

    def _volume_of(self, path: str) -> Volume | None:
        above = [volume for volume in self._volumes if PurePosixPath(path).is_relative_to(volume.mount_path)]
        return max(above, key=lambda volume: len(PurePosixPath(volume.mount_path).parts), default=None)
