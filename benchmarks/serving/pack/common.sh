# What packages for machines without a network share: sourced, with `python` and `out` set. They are for CPython 3.12.
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
most=$((40 << 20)) # bytes of an archive
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

wheels=(--python-version 3.12 --implementation cp --only-binary=:all: --no-deps)
for glibc in ${NEWEST_GLIBC:-} 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do
  wheels+=(--platform "manylinux_${glibc}_x86_64")
done
for older in 2014 2010 1; do wheels+=(--platform "manylinux${older}_x86_64"); done

# REQUIREMENTS: into $work/site
take_packages() {
  "$python" -m pip install -qq "${wheels[@]}" --no-compile --target "$work/site" -r "$1"
  sed -i '\#^\.\./\.\./bin/#d' "$work"/site/*.dist-info/RECORD # they name this machine's Python
  rm -rf "$work"/site/{bin,*/tests}
}

# $work/tree and $work/site to $out/part-00 and SHA256
make_archive() {
  local size same=(--sort=name --owner=0 --group=0 --numeric-owner --mode=u+rw,go=rX --mtime=2026-01-01T00:00:00Z)
  find "$work/tree" "$work/site" -name __pycache__ -type d -prune -exec rm -r {} +
  mkdir -p "$out"
  tar "${same[@]}" -C "$work" -cf - tree site |
    xz -9 -T"${JOBS:-2}" --block-size=192MiB --memlimit-compress=0 > "$work/part-00"
  size=$(stat -c %s "$work/part-00")
  [ "$size" -le "$most" ] || { echo "the archive has $size bytes, but $most are the most" >&2; exit 1; }
  (cd "$work" && sha256sum part-00 > SHA256)
  mv "$work/part-00" "$work/SHA256" "$out/"
  echo "$out/part-00: $size bytes, after $SECONDS s"
}
