#!/bin/sh
# HAProxy as Ray Serve starts it (haproxy -db -f FILE ...), but for its metrics and statistics, which Ray's configuration
# offers on every interface and which are for this machine alone. `make serve` sets RAY_SERVE_HAPROXY_BINARY_PATH to it.
set -eu
sed -i -e '/^frontend prometheus$/,/^frontend / s/^\( *bind \):/\1127.0.0.1:/' \
    -e '/^listen stats$/,$ s/^\( *bind \)\*:/\1127.0.0.1:/' "$3"
exec "$HAPROXY" "$@"
