# Sourced from the repository root: a compiler, a linker and an emulator for aarch64 on x86-64.
# shellcheck shell=bash
#
# A cross linker, the emulator and a compiler that has the aarch64 standard library are Debian
# packages, downloaded through apt's own configured sources and unpacked in target/aarch64 (about
# 700 MB). Nothing is installed, and root is not needed. A Rust toolchain that already has the
# target (`rustup target add aarch64-unknown-linux-gnu`) is used instead of Debian's.
#
# `use_aarch64` ends the script with 77 where this machine cannot do that; the last line then says
# what it would need.

tools=$PWD/target/aarch64
root=$tools/root

absent() {
    printf 'absent: needs %s\n' "$1"
    exit 77
}

# Lists and packages of both architectures in a state of our own: the system's stays as it is.
configure_apt() {
    mkdir -p "$tools"/apt/{lists/partial,cache/archives/partial} "$tools/debs"
    # No package counts as installed, so that each is offered for download.
    : >"$tools/apt/status"
    cat >"$tools/apt.conf" <<CONF
Dir::State "$tools/apt";
Dir::State::Lists "$tools/apt/lists";
Dir::State::status "$tools/apt/status";
Dir::Cache "$tools/apt/cache";
#clear APT::Architectures;
APT::Architectures { "amd64"; "arm64"; };
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Post-Invoke;
Acquire::Languages "none";
Acquire::Retries "3";
APT::Sandbox::User "";
CONF
    export APT_CONFIG=$tools/apt.conf
}

# Of all that the cross compiler and rustc depend on, what is not on every Debian machine: the
# versioned names change from release to release.
packages() {
    apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
        --no-replaces --no-enhances \
        rustc-web gcc-aarch64-linux-gnu libc6-dev-arm64-cross 2>/dev/null |
        grep -E -x "$(
            printf '%s|' \
                'rustc-web' 'libstd-rust-web-[0-9.]+' 'libstd-rust-web-dev' 'libllvm[0-9]+' \
                'gcc-[0-9]+-aarch64-linux-gnu' 'binutils-aarch64-linux-gnu' 'libbinutils' \
                'libgcc-[0-9]+-dev-arm64-cross' 'libgcc-s1-arm64-cross' 'libc6(-dev)?-arm64-cross'
            printf 'libjansson4'
        )" | sort -u
    echo libstd-rust-web-dev:arm64
    echo qemu-user-static
}

# Fills target/aarch64/root; the file `ready` marks it whole.
unpack() {
    [[ -e $tools/ready ]] && return
    [[ $(uname -m) == x86_64 ]] || absent "an x86-64 or aarch64 machine"
    command -v apt-get dpkg >/dev/null || absent "apt and dpkg"
    configure_apt
    echo "downloading an aarch64 toolchain to ${tools#"$PWD"/}"
    apt-get update -qq || absent "apt sources that answer"
    apt-cache show rustc-web libstd-rust-web-dev:arm64 >/dev/null 2>&1 ||
        absent "apt sources with rustc-web, as in Debian 12"
    local wanted
    mapfile -t wanted < <(packages)
    rm -rf "$root"
    mkdir "$root"
    (cd "$tools/debs" && apt-get download -qq "${wanted[@]}") ||
        absent "the packages ${wanted[*]}"
    local deb
    for deb in "$tools"/debs/*.deb; do
        dpkg --extract "$deb" "$root"
    done
    rm -r "$tools/debs" "$tools/apt"
    # The package has an emulator for every architecture, 400 MB of them.
    find "$root/usr/bin" -name 'qemu-*' ! -name qemu-aarch64-static -delete
    wrap aarch64-linux-gnu-gcc "$(cd "$root/usr/bin" && ls -d aarch64-linux-gnu-gcc-[0-9]*)" \
        "--sysroot=\"\$root\""
    wrap rustc rustc
    wrap rustdoc rustdoc
    touch "$tools/ready"
}

# Makes bin/$1, which runs $2 of the unpacked root with the root's own libraries and the option $3.
wrap() {
    mkdir -p "$tools/bin"
    cat >"$tools/bin/$1" <<WRAPPER
#!/bin/sh
root=\${0%/*}/../root
libraries=\$root/usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH="\$libraries\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
exec "\$root/usr/bin/$2" ${3:-} "\$@"
WRAPPER
    chmod +x "$tools/bin/$1"
}

# Has cargo compile for aarch64.
use_aarch64() {
    unpack
    if [[ ! -d $(rustc --print sysroot)/lib/rustlib/aarch64-unknown-linux-gnu/lib ]]; then
        export RUSTC=$tools/bin/rustc RUSTDOC=$tools/bin/rustdoc
    fi
    "${RUSTC:-rustc}" --version
}
