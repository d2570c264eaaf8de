"""The README as a package index shows it: an index has none of the files that its links name."""

import re
from pathlib import Path

# The address of the public repository, once there is one ("https://HOST/OWNER/kvswap"). The package's URLs, and the
# README's links on an index, follow from it; without it links become plain text.
REPOSITORY = ""

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)")


def index_readme(path, version, repository=REPOSITORY):
    def absolute(match):
        image, text, target = match.groups()
        if not repository:
            return "" if image else text
        return f"{image}[{text}]({repository}/{'raw' if image else 'blob'}/v{version}/{target})"

    return LINK.sub(absolute, Path(path).read_text())


def urls(version, repository=REPOSITORY):
    if not repository:
        return {}
    tree = f"{repository}/blob/v{version}"
    return {
        "Repository": repository,
        "Documentation": f"{tree}/docs/guide.md",
        "Changelog": f"{tree}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
