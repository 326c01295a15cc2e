"""Maps paths of a job to local paths; the user provides a local folder for each volume."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from finetune_api.v1alpha1.job import FineTuneJobSpec
from finetune_api.v1alpha1.pod_types import Volume
from finetune_cli.errors import BadInput
from finetune_cli.job_file import JobFile
from finetune_operator.observation.ownership import RawBody


@dataclass(frozen=True)
class LocalMount:
    """Mount path in the pod and the local path that replaces it."""

    mount_path: str
    local_path: Path


def map_to_local_path(path: str, mounts: Iterable[LocalMount]) -> str | None:
    """Map a path by the deepest mount that contains the path; return None if there is no such mount."""
    pod_path = PurePosixPath(path)
    candidates = [mount for mount in mounts if pod_path.is_relative_to(mount.mount_path)]
    if not candidates:
        return None
    mount = max(candidates, key=lambda mount: len(PurePosixPath(mount.mount_path).parts))
    return str(mount.local_path / pod_path.relative_to(mount.mount_path))


def parse_volumes(volume_options: Sequence[str], spec: FineTuneJobSpec) -> tuple[LocalMount, ...]:
    """Parse `--volume NAME=DIR`, where DIR has the content of the volume's mountPath. Raises BadInput."""
    mount_paths = {volume.name: volume.mount_path for volume in spec.volumes}
    mounts, problems = [], []
    for option in volume_options:
        name, _, folder = option.partition("=")
        if not folder:
            problems.append(f"--volume {option}: expected NAME=DIR, such as data=./data")
        elif name not in mount_paths:
            problems.append(f"--volume {name}: the job has no such volume; it has {', '.join(mount_paths) or 'none'}")
        elif not Path(folder).is_dir():
            problems.append(f"--volume {name}: {folder} is not a folder")
        else:
            mounts.append(LocalMount(mount_paths[name], Path(folder).resolve()))
    if problems:
        raise BadInput(*problems)
    return tuple(mounts)


def map_job_paths(job_file: JobFile, mounts: Sequence[LocalMount]) -> RawBody:
    """Return the job body with local paths for model and datasets, or for its command. Raises BadInput."""
    resolver = _PathResolver(job_file, mounts)
    spec = job_file.body["spec"]
    if job_file.job.spec.command is not None:
        command = _map_command(spec["command"], resolver)
        if resolver.problems:
            raise BadInput(*(f"{job_file.path}: {problem}" for problem in resolver.problems))
        return {**job_file.body, "spec": {**spec, "command": command}}
    model = {**spec["model"], "name": resolver.resolve_model("spec.model.name", spec["model"]["name"])}
    lora = _map_lora(spec, resolver)
    dataset = {**spec["dataset"]}
    for key in ("train", "eval"):
        if key in dataset:
            dataset[key] = [
                {**source, "name": resolver.resolve_dataset(f"spec.dataset.{key}[{n}].name", source["name"])}
                for n, source in enumerate(dataset[key])
            ]
    if resolver.problems:
        raise BadInput(*(f"{job_file.path}: {problem}" for problem in resolver.problems))
    return {**job_file.body, "spec": {**spec, **lora, "model": model, "dataset": dataset}}


def _map_lora(spec: RawBody, resolver: "_PathResolver") -> RawBody:
    """Return the lora section with a local adapter path, or {} without an adapter."""
    adapter = (spec.get("lora") or {}).get("adapter")
    return (
        {"lora": {**spec["lora"], "adapter": resolver.resolve_model("spec.lora.adapter", adapter)}} if adapter else {}
    )


def _map_command(command: RawBody, resolver: "_PathResolver") -> RawBody:
    """Map path arguments and the working directory, which defaults to the folder of the job file."""
    arguments: RawBody = {
        key: [resolver.map_argument(argument) for argument in command[key]]
        for key in ("args", "exec")
        if key in command
    }
    script = {"script": resolver.map_argument(command["script"])} if "script" in command else {}
    folder = resolver.resolve("spec.command.workingDir", command.get("workingDir", "."))
    return {**command, **arguments, **script, "workingDir": folder}


def map_model_path(job_file: JobFile, mounts: Sequence[LocalMount]) -> RawBody:
    """Return the spec with local paths for model and adapter. Raises BadInput."""
    resolver = _PathResolver(job_file, mounts)
    spec = job_file.body["spec"]
    model = {**spec["model"], "name": resolver.resolve_model("spec.model.name", spec["model"]["name"])}
    lora = _map_lora(spec, resolver)
    if resolver.problems:
        raise BadInput(*(f"{job_file.path}: {problem}" for problem in resolver.problems))
    return {**spec, **lora, "model": model}


class _PathResolver:
    """Resolves paths of a job to local paths, and collects problems."""

    def __init__(self, job_file: JobFile, mounts: Sequence[LocalMount]) -> None:
        self._base = job_file.path.resolve().parent
        self._volumes = job_file.job.spec.volumes
        self._mounts = mounts
        self.problems: list[str] = []

    def resolve_model(self, field_path: str, name: str) -> str:
        """Resolve the path of a model or adapter; a Hub id is returned unchanged."""
        if name.startswith(("/", "./", "../")) or (self._base / name).exists():
            return self.resolve(field_path, name)
        return name

    def map_argument(self, argument: str) -> str:
        """Return the local path if the argument is a path on a volume, otherwise the argument."""
        return map_to_local_path(argument, self._mounts) or argument

    def resolve_dataset(self, field_path: str, name: str) -> str:
        """Resolve the path of a dataset and keep the suffix for the number of rows, as in `path#1000`."""
        path, sign, number = name.partition("#")
        return f"{self.resolve(field_path, path)}{sign}{number}"

    def resolve(self, field_path: str, path: str) -> str:
        """Return the local path; if the path does not exist, record a problem with the name of the field."""
        local_path = map_to_local_path(path, self._mounts) or str(self._base / path)
        volume = self._find_volume(path)
        if volume is not None and volume.mount_path not in {mount.mount_path for mount in self._mounts}:
            self.problems.append(f"{field_path}: {path} is on volume {volume.name}; add --volume {volume.name}=DIR")
        elif not Path(local_path).exists():
            suffix = f" ({local_path})" if local_path != path else ""
            self.problems.append(f"{field_path}: {path}: no such file or folder{suffix}")
        return local_path

    def _find_volume(self, path: str) -> Volume | None:
        candidates = [volume for volume in self._volumes if PurePosixPath(path).is_relative_to(volume.mount_path)]
        return max(candidates, key=lambda volume: len(PurePosixPath(volume.mount_path).parts), default=None)
