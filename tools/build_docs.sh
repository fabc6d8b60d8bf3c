#!/usr/bin/env bash
# The documentation site from docs/ and the docstrings. A broken link or an unknown name is an error.
#
#   tools/build_docs.sh [FOLDER]    (default: site)
#   tools/build_docs.sh --serve     show it at http://127.0.0.1:8000 and rebuild on every change
set -euo pipefail
# shellcheck source=launch/_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/../launch/_venv.sh"

ensure_venv dev
export NO_MKDOCS_2_WARNING=1 # an advertisement of its successor
if [ "${1:-}" = --serve ]; then exec mkdocs serve --strict; fi
mkdocs build --strict --quiet --site-dir "${1:-site}"
say "the site is in ${1:-site}"
