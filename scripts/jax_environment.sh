# Sourced from the repository root by what tests pallas_bridge through one version of JAX.
# shellcheck shell=bash
source scripts/packages.sh

# The first interpreter that a version of JAX runs on: PYTHON, those on PATH, pyenv's.
find_python() {
    local version=$1 oldest candidates=("${PYTHON:-python3}" python3.{11,12,13,14}) candidate
    case $version in
        0.9.* | 0.10.*) oldest=11 ;;
        *) oldest=12 ;;
    esac
    if command -v pyenv >/dev/null; then
        candidates+=("$(pyenv root)"/versions/*/bin/python)
    fi
    for candidate in "${candidates[@]}"; do
        # pyenv's shims are on PATH for versions that are not chosen, and fail.
        if "$candidate" -c "import sys; sys.exit(not (3, $oldest) <= sys.version_info < (3, 14))" \
            2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    printf 'absent: needs python 3.%d to 3.13, which jax %s runs on\n' "$oldest" "$version"
    exit 77
}

# Puts a virtual environment of a version of JAX on PATH, made where it is not there or out of date, with
# pytest, and with what files of requirements name, where VERSION stands for that of JAX; of a package that
# several have it is the first one's. Exits 77 where no Python is found that this version runs on.
#
#     use_jax_environment FOLDER VERSION [FILE..]
use_jax_environment() {
    local environment=$PWD/$1 version=$2 found stamp sum
    shift 2
    stamp=$environment/requirements.cksum
    sum=$(cat scripts/requirements-jax.txt scripts/requirements-test.txt "$@" | cksum)
    if [[ ! -f $stamp || $(<"$stamp") != "$sum" ]]; then
        found=$(find_python "$version") || {
            printf '%s\n' "$found"
            exit 77
        }
        make_environment "$found" "$environment"
        # Versions of all but jax and jaxlib are those of the other tests.
        {
            sed -E "s/^(jax|jaxlib)==.*/\1==$version/" scripts/requirements-jax.txt
            grep -E '^(pytest|iniconfig|packaging|pluggy|pygments)==' scripts/requirements-test.txt
            (($# == 0)) || sed "s/VERSION/$version/" "$@"
        } | awk -F '==' '!seen[$1]++' >"$environment/requirements.txt"
        install_packages "$environment/bin/python" --requirement "$environment/requirements.txt"
        # Last, so that an environment that was cut short is made again.
        printf '%s\n' "$sum" >"$stamp"
    fi
    export PATH=$environment/bin:$PATH
    python -c 'import jax, sys; print(f"jax {jax.__version__}, python {sys.version.split()[0]}")'
}

# Builds a wheel of pallas_bridge in XENTILE_TEST_WHEELS, where one serves every tier of a run of scripts/test.sh.
build_pallas_bridge() {
    export XENTILE_TEST_WHEELS=${XENTILE_TEST_WHEELS:-$(mktemp -d)}
    (
        # One at a time: what another builds now, this one finds.
        exec 9<scripts/jax_environment.sh
        flock 9
        if compgen -G "$XENTILE_TEST_WHEELS/pallas_bridge-*.whl" >/dev/null; then exit; fi
        use_cargo_of_tests
        ensure_pip python
        python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$XENTILE_TEST_WHEELS" ./pallas_bridge
    )
}

# Installs it in the environment on PATH.
install_pallas_bridge() {
    build_pallas_bridge
    # --force-reinstall, as the version stays the same from one change to the next.
    install_packages "$(command -v python)" --force-reinstall "$XENTILE_TEST_WHEELS"/pallas_bridge-*.whl
}
