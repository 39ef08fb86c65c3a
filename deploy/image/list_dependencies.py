"""Print what the project needs, one requirement a line: `list_dependencies.py [EXTRA ...]`.

For images, which install it before the project's code is there.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = [project["optional-dependencies"][name] for name in sys.argv[1:]]
for requirements in (project["dependencies"], *extras):
    print("\n".join(requirements))  # noqa: T201
