# Install into a virtual environment: sh docs/scripts/install.sh PYTHON ARGUMENTS...
# The arguments are those of `pip install`.
# uv needs two thirds of pip's CPU time, with its cache a fifth, but does not read pip's settings: it is told the indexes that
# pip is set to. Where uv cannot be installed or fails, pip installs.

python=$1
shift

# A module is compiled at its first import: compiling all takes half of an installation's CPU time.
pip_install() {
	"$python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"
}

# Read from what `pip config list` prints: the environment's come first, and lines of a value are joined by \n.
pip_setting() {
	printf '%s\n' "$settings" | sed -nE "s/\\\\n/ /g; s/^.*\.$1='(.*)'/\1/p" | head -n 1 | xargs
}

uv_install() {
	settings=$("$python" -m pip config list)
	UV_DEFAULT_INDEX=$(pip_setting index-url) UV_INDEX=$(pip_setting extra-index-url) \
	UV_FIND_LINKS=$(pip_setting find-links | tr ' ' ,) \
		"$python" -m uv pip install --quiet --python "$python" --index-strategy unsafe-best-match "$@"
}

pip_install --constraint constraints.txt --only-binary uv uv && uv_install "$@" || pip_install "$@"
