"""Render the packages of lock files as a software bill of materials in the format CycloneDX 1.6."""

from collections.abc import Iterable
from datetime import datetime
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from lockfile import LockedPackage

PROJECT = "https://github.com/finetune-operator/finetune-operator"


def render_sbom(name: str, version: str, packages: Iterable[LockedPackage], *, created_at: datetime) -> str:
    """Return the bill of materials of a product with these packages as JSON.

    Raises: ValueError if it does not satisfy the schema of CycloneDX
    """
    product = Component(name=name, version=version, type=ComponentType.APPLICATION, bom_ref=name)
    bom = Bom(components={_build_component(package) for package in packages})
    bom.serial_number = uuid5(NAMESPACE_URL, f"{PROJECT}#{name}@{version}")  # reproducible
    bom.metadata.component = product
    bom.metadata.timestamp = created_at
    bom.register_dependency(product, bom.components)
    text = JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
    if (problem := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise ValueError(f"{name}: {problem}")
    return text


def _build_component(package: LockedPackage) -> Component:
    """Build the component of a package; its artefacts for all platforms share one reference with their hashes."""
    url = PackageURL("pypi", name=package.name, version=package.version)
    artefacts = ExternalReference(
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(f"https://pypi.org/project/{package.name}/{package.version}/"),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=value) for value in package.hashes],
    )
    marker = package.requirement.partition(";")[2].strip()
    return Component(
        name=package.name,
        version=package.version,
        bom_ref=str(url) + (f"#{marker}" if marker else ""),
        purl=url,
        external_references=[artefacts],
        properties=[Property(name="finetune:environment-marker", value=marker)] if marker else [],
    )
