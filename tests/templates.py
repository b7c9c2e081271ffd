"""CloudFormation templates, read as data."""

from __future__ import annotations

import pathlib
from typing import Any

import yaml
from moto.cloudformation.utils import yaml_tag_constructor

INFRA = pathlib.Path(__file__).parent.parent / "infra"


class _Loader(yaml.SafeLoader):
    """Reads `!Ref name` as `{"Ref": "name"}`, and so on."""


_Loader.add_multi_constructor("", yaml_tag_constructor)


def load(name: str) -> Any:
    """Read a template below `infra/`."""
    return yaml.load((INFRA / name).read_text(), Loader=_Loader)  # noqa: S506 (a SafeLoader)
