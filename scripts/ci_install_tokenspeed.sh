#!/usr/bin/env bash
# Makes an environment with TokenSpeed in it, built from a commit of its source. It is an environment of its own:
# what TokenSpeed requires includes another package that installs itself as `smg`.
#
#   scripts/ci_install_tokenspeed.sh [--dry-run] [--path DIR] [--ref COMMIT] [--python PYTHON]
#
#   --dry-run        print the commands, run none
#   --path DIR       where to (default: .venv-tokenspeed); the source goes to DIR/src
#   --ref COMMIT     another commit of TokenSpeed's; it has to come after the pinned one
#   --python PYTHON  the interpreter that makes the environment (default: python3)
#
# Building its kernels needs a CUDA toolkit, and 20 to 30 minutes. MAX_JOBS bounds the compilers that run at once.
set -euo pipefail

# `smg serve` starts several ranks in a way that takes this commit or a later one.
pinned=04bc08649f3e53e19144ee86564be7c6121c99d2
repository=https://github.com/lightseekorg/tokenspeed.git

path=.venv-tokenspeed
ref=$pinned
python=python3
dry_run=false
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry_run=true ;;
    --path | --ref | --python)
      if [ $# -lt 2 ]; then
        echo "$0: $1 needs a value" >&2
        exit 2
      fi
      declare "${1#--}=$2"
      shift
      ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"
      exit 0
      ;;
    *)
      echo "$0: $1: no such option; see $0 --help" >&2
      exit 2
      ;;
  esac
  shift
done

run() {
  printf '+ %s\n' "$(printf '%q ' "$@")"
  if ! $dry_run; then "$@"; fi
}

source_path=$path/src
pip=("$path/bin/python" -m pip install --disable-pip-version-check)

run "$python" -m venv "$path"
if [ ! -d "$source_path/.git" ]; then
  run git clone --filter=blob:none --no-checkout "$repository" "$source_path"
fi
run git -C "$source_path" fetch origin "$ref"
run git -C "$source_path" merge-base --is-ancestor "$pinned" "$ref"
run git -C "$source_path" checkout --detach "$ref"
run git -C "$source_path" submodule update --init --recursive

# The runtime brings torch, which the kernels are then built against, in the same environment.
run "${pip[@]}" --editable "$source_path/python"
run "${pip[@]}" 'setuptools>=77' wheel ninja
run env TOKENSPEED_KERNEL_BACKEND=cuda "${pip[@]}" --no-build-isolation "$source_path/tokenspeed-kernel/python"
run "${pip[@]}" "$source_path/tokenspeed-scheduler"

# From another directory and without this checkout's `smg` in reach, as `serve` asks it.
run env --chdir=/ -u PYTHONPATH PYTHONSAFEPATH=1 "$(realpath -m "$path")/bin/python" -c 'import tokenspeed.cli'
