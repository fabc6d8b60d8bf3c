# shellcheck shell=bash
# Sourced by the scripts in this directory: one virtual environment, reused until its requirements change. Sets ROOT (the
# clone, which becomes the current directory) and VENV; `ensure_venv run|dev` installs into it.
#
#   DS_TRAINER_VENV  its location (default: .venv in the clone)
#   PYTHON           the Python to create it with (default: the first supported of python3, python3.13 ... python3.10)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
cd "$ROOT" || exit 1
VENV="${DS_TRAINER_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$ROOT/$VENV" ;; esac

TORCH_VERSION="$(sed -n 's/^torch==//p' constraints.txt)"

say() { printf '[ds-trainer] %s\n' "$*"; }

die() {
    printf '[ds-trainer] error: %s\n' "$*" >&2
    exit 1
}

# Prints the version of a Python as "3.11"; nothing if it does not run.
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

supported() { case "$1" in 3.10 | 3.11 | 3.12 | 3.13) true ;; *) false ;; esac }

# Prints the Python to create the environment with.
find_python() {
    local candidate version seen=""
    if [ -n "${PYTHON:-}" ]; then
        version="$(version_of "$PYTHON")"
        [ -n "$version" ] || die "PYTHON=$PYTHON does not run; set it to the path of a Python 3.10 to 3.13."
        supported "$version" || die "PYTHON=$PYTHON is Python $version; Python 3.10 to 3.13 is required."
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
        version="$(version_of "$candidate")"
        if supported "$version"; then
            printf '%s\n' "$candidate"
            return
        fi
        [ -z "$version" ] || seen="$seen$candidate is $version; "
    done
    die "Python 3.10 to 3.13 is required, and none is on PATH (${seen:-no python3 found; }set PYTHON to the path of one)."
}

make_venv() {
    local python have wanted
    if [ -x "$VENV/bin/python" ]; then
        have="$(version_of "$VENV/bin/python")"
        supported "$have" ||
            die "the Python in $VENV ${have:+is $have and }cannot be used: delete that directory and run this script again."
        if [ -n "${PYTHON:-}" ]; then
            python="$(find_python)"
            wanted="$(version_of "$python")"
            [ "$wanted" = "$have" ] ||
                die "$VENV holds Python $have, PYTHON is $wanted: delete that directory, or set DS_TRAINER_VENV to another."
        fi
        return
    fi
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ] && [ -n "$(ls -A "$VENV")" ]; then
        die "$VENV exists and is not a virtual environment; set DS_TRAINER_VENV to another directory."
    fi
    python="$(find_python)"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python cannot create virtual environments; on Debian and Ubuntu: apt-get install python3-venv."
    say "creating $VENV with Python $(version_of "$python")"
    "$python" -m venv "$VENV"
}

# Hash of what determines the environment: the pins, the metadata, and the path of the clone (an editable install).
stamp_key() {
    "$VENV/bin/python" - "$ROOT" pyproject.toml constraints.txt <<'PY'
import hashlib
import sys

key = hashlib.sha256(sys.argv[1].encode())
for name in sys.argv[2:]:
    with open(name, "rb") as file:
        key.update(b"\0" + file.read())
print(key.hexdigest())
PY
}

stamped() { [ -f "$VENV/.ds_trainer_$1" ] && [ "$(cat "$VENV/.ds_trainer_$1")" = "$2" ]; }

install_into_venv() {
    local kind="$1" key="$2" extras
    case "$kind" in run) extras="hf" ;; dev) extras="dev" ;; *) die "unknown environment '$kind'" ;; esac
    # An interrupted installation must not look complete.
    rm -f "$VENV/.ds_trainer_run" "$VENV/.ds_trainer_dev"
    say "installing torch $TORCH_VERSION (takes minutes the first time)"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$TORCH_VERSION"
    say "installing ds-trainer[$extras]"
    # The variables apply the pins to build backends too: older versions of pip read the first, newer ones the second.
    # --use-pep517: pip before 23.1 would otherwise build deepspeed in this environment, with its setuptools.
    PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
        "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --use-pep517 -c constraints.txt \
        -e ".[$extras]"
    printf '%s\n' "$key" >"$VENV/.ds_trainer_$kind.new"
    mv "$VENV/.ds_trainer_$kind.new" "$VENV/.ds_trainer_$kind"
}

# Installs into VENV what "run" (training) or "dev" (training, tests and linters) needs, and puts it first on PATH.
ensure_venv() {
    local kind="$1" key
    make_venv
    key="$(stamp_key)"
    if ! stamped dev "$key" && ! { [ "$kind" = run ] && stamped run "$key"; }; then
        (
            # Two scripts must not install into the same directory at the same time.
            if command -v flock >/dev/null; then flock 9; fi
            if ! stamped dev "$key" && ! { [ "$kind" = run ] && stamped run "$key"; }; then
                install_into_venv "$kind" "$key"
            fi
        ) 9>"$VENV/.ds_trainer_lock"
    fi
    export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
    unset PYTHONHOME
    # DeepSpeed caches compiled operators here; the cache is valid for one environment only.
    export TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$VENV/torch_extensions}"
    export TOKENIZERS_PARALLELISM=false
}
