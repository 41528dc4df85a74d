"""Put a software bill of materials into the wheel (PEP 770): a CycloneDX document of seqpar and what it requires.

It is made while building, because a file in the repository would state version and requirements a second time.
Nothing of another project is inside the wheel, so each requirement is external: a range of versions, not one version.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

IN_VERS = {">=", "<=", ">", "<", "!="}
"""The comparisons that a range of versions in CycloneDX ("vers") writes as requirements do."""


def bill_of_materials(name: str, version: str, licence: str, requirements: list[str]) -> dict[str, Any]:
    """Return the document. It has neither a date nor a serial number: equal sources give equal wheels."""
    package = f"pkg:pypi/{name}@{version}"
    required = [external(Requirement(text)) for text in requirements]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.7.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.7",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": package,
                "name": name,
                "version": version,
                "licenses": [{"license": {"id": licence}}],
                "purl": package,
            }
        },
        "components": required,
        "dependencies": [{"ref": package, "dependsOn": [component["bom-ref"] for component in required]}],
    }


def external(requirement: Requirement) -> dict[str, Any]:
    """Return the component of a required package."""
    clauses = sorted(requirement.specifier, key=lambda clause: Version(clause.version))
    if unknown := {clause.operator for clause in clauses} - IN_VERS:
        raise ValueError(f"{requirement} in pyproject.toml: the bill of materials has {sorted(IN_VERS)}, not {unknown}")
    package = f"pkg:pypi/{canonicalize_name(requirement.name)}"
    component: dict[str, Any] = {"type": "library", "bom-ref": package, "name": requirement.name, "purl": package}
    if clauses:
        component["versionRange"] = "vers:pypi/" + "|".join(map(str, clauses))
    return {**component, "isExternal": True}


class BillOfMaterials(BuildHookInterface[Any]):
    """The hook that hatchling calls before it makes a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the document to a temporary folder, and name it to hatchling."""
        core = self.metadata.core
        document = bill_of_materials(core.name, self.metadata.version, core.license_expression, core.dependencies)
        self.folder = TemporaryDirectory()
        file = Path(self.folder.name) / f"{core.name}.cdx.json"
        file.write_text(json.dumps(document, indent=2) + "\n")
        build_data["sbom_files"].append(str(file))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        self.folder.cleanup()
