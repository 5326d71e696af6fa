"""The system calls that a program in a box may make; everything else is refused.

An allow-list: what a later kernel adds is refused too. Refused are, on purpose: every socket except a socket pair,
namespaces, mounts, tracing, other processes' memory, keys, bpf, io_uring, performance counters, shared memory segments,
message queues, memory files, changes of owner, mode and attributes of files, and the terminal.
"""

from __future__ import annotations

import errno
import tempfile

from gspo.errors import InputError

_FILES = """
access faccessat faccessat2 open openat openat2 creat close close_range read write readv writev pread64 pwrite64
preadv pwritev preadv2 pwritev2 lseek _llseek stat lstat fstat newfstatat fstat64 fstatat64 stat64 lstat64 statx
statfs fstatfs statfs64 fstatfs64 getdents getdents64 readlink readlinkat getcwd chdir fchdir mkdir mkdirat rmdir
unlink unlinkat rename renameat renameat2 link linkat symlink symlinkat ftruncate ftruncate64 fallocate fsync
fdatasync sync_file_range flock dup dup2 dup3 pipe pipe2 umask sendfile sendfile64 splice tee
copy_file_range fadvise64 readahead
"""
_MEMORY = """
brk mmap mmap2 munmap mremap mprotect madvise msync mincore mlock munlock pkey_alloc pkey_free pkey_mprotect
membarrier mseal
"""
_PROCESSES = """
fork vfork execve execveat exit exit_group wait4 waitid waitpid getpid getppid gettid getuid geteuid getgid getegid
getresuid getresgid getgroups setuid setgid setreuid setregid setresuid setresgid setgroups capget capset prctl
arch_prctl getpgid getpgrp setpgid getsid setsid set_tid_address set_robust_list get_robust_list rseq futex
futex_waitv sched_yield sched_getaffinity sched_setaffinity sched_getparam sched_getscheduler sched_get_priority_max
sched_get_priority_min getpriority getrlimit setrlimit prlimit64 getrusage times uname sysinfo getcpu getrandom
restart_syscall
"""
_TIME = """
time gettimeofday clock_gettime clock_getres clock_nanosleep nanosleep alarm getitimer setitimer timer_create
timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime timerfd_gettime
clock_gettime64 clock_nanosleep_time64 futex_time64
"""
_EVENTS = """
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause select pselect6
poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 signalfd
signalfd4 pselect6_time64 ppoll_time64 rt_sigtimedwait_time64
"""
_SOCKET_PAIR = "recvfrom sendto recvmsg sendmsg shutdown getsockname getpeername getsockopt"
_SIGNALS = "kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo"
#: Refused as "not implemented", so that the C library falls back on an older call.
_ABSENT = "clone3"
#: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET (clone cannot carry NEWTIME)
_NAMESPACE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
#: TCGETS, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TIOCGWINSZ: what Python asks of its streams.
_IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451, 0x5413)
#: F_DUPFD, GETFD, SETFD, GETFL, SETFL, GETLK, SETLK, SETLKW, the same for open files, DUPFD_CLOEXEC, GETPIPE_SZ. Not:
#: F_SETOWN and F_SETSIG, with which a descriptor would send signals.
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1032)
_AF_UNIX = 1


def build_filter(signals: bool = True) -> bytes:
    """The compiled filter, for ``bwrap --seccomp`` or ``prctl(PR_SET_SECCOMP)``.

    Args:
        signals: whether signals may be sent; only where the box cannot see other processes, or cannot reach them.

    Raises:
        InputError: pyseccomp or libseccomp is not installed.
    """
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise InputError(
            f"the sandbox needs pyseccomp and the system's libseccomp ({error}): pip install 'gspo[sandbox]'"
        ) from error
    rules = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    names = " ".join((_FILES, _MEMORY, _PROCESSES, _TIME, _EVENTS, _SOCKET_PAIR, _SIGNALS if signals else "")).split()
    for name in dict.fromkeys(names):
        if _known(name):
            rules.add_rule(pyseccomp.ALLOW, name)
    for name in _ABSENT.split():
        if _known(name):
            rules.add_rule(pyseccomp.ERRNO(errno.ENOSYS), name)
    arg, equal, masked = pyseccomp.Arg, pyseccomp.EQ, pyseccomp.MASKED_EQ
    rules.add_rule(pyseccomp.ALLOW, "clone", arg(0, masked, _NAMESPACE_FLAGS, 0))
    rules.add_rule(pyseccomp.ALLOW, "socketpair", arg(0, equal, _AF_UNIX))
    for request in _IOCTLS:
        rules.add_rule(pyseccomp.ALLOW, "ioctl", arg(1, equal, request))
    for command in _FCNTLS:
        for name in filter(_known, ("fcntl", "fcntl64")):
            rules.add_rule(pyseccomp.ALLOW, name, arg(1, equal, command))
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()


def _known(name: str) -> bool:
    """Whether this machine's architecture has the call and libseccomp knows it."""
    import pyseccomp

    try:
        return int(pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)) >= 0
    except (ValueError, OSError, RuntimeError):
        return False
