"""Runs one program under Landlock, a seccomp filter, limits and an own user, and ends all that comes from it.

Started by ``gspo.sandbox.native`` as ``python -I -S supervise.py CONFIG STATUS LEASH`` (three descriptors). Needs
nothing but the standard library of Python 3.11. The supervisor itself is not confined: it lives until the program ends
or the leash is closed at the other end (also by the death of the judge), then kills every descendant, reports and ends.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
from typing import Any

PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 24, 22, 36, 38
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
#: Rights over files and directories by the first version of the interface that knows them.
FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
NETWORK_RIGHTS, SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> int:
    """The result of a C call; raises OSError if it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> int:
    values = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    return check(LIBC.prctl(option, *values), f"prctl {option}")


class Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("descriptor", ctypes.c_int32)]


def restrict_files(readable: list[str], listed: list[str], version: int) -> None:
    """Landlock: only ``readable`` paths can be read, only ``listed`` directories be listed, nothing can be written."""
    handled = sum(rights for since, rights in FILE_RIGHTS.items() if since <= version)
    ruleset = Ruleset(handled, NETWORK_RIGHTS if version >= 4 else 0, SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    create = LIBC.syscall(LANDLOCK_CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), 0)
    descriptor = check(create, "landlock_create_ruleset")
    for path in readable:
        rights = READ_FILE | EXECUTE | (READ_DIR if os.path.isdir(path) else 0)
        allow(descriptor, path, rights)
    for path in listed:
        allow(descriptor, path, READ_DIR)
    check(LIBC.syscall(LANDLOCK_RESTRICT_SELF, descriptor, 0), "landlock_restrict_self")
    os.close(descriptor)


def allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    rule = PathRule(rights, opened)
    check(LIBC.syscall(LANDLOCK_ADD_RULE, ruleset, 1, ctypes.byref(rule), 0), "landlock_add_rule")
    os.close(opened)


class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install_filter(code: bytes) -> None:
    """The seccomp filter: ``code`` holds instructions of 8 bytes."""
    program = Program(len(code) // 8, code)
    check(LIBC.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0), "prctl PR_SET_SECCOMP")


def become(user: int) -> None:
    """Takes the user id of the box and gives up all capabilities, for good."""
    for capability in range(64):
        if LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def set_limits(limits: dict[str, list[int]], user: int | None) -> None:
    """Limits of the kernel. Processes are counted by user: an ordinary user's own ones are added to the allowance."""
    for name, (soft, hard) in limits.items():
        if name == "nproc" and user is None:
            soft += running_tasks()
            hard = soft
        resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (soft, hard))


def running_tasks() -> int:
    """Processes and threads of this user."""
    count, user = 0, os.getuid()
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # gone meanwhile
            continue
    return count


def confine(config: dict[str, Any]) -> None:
    """All restrictions of one run, in the process that becomes the program."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(config["directory"])
    set_limits(config["limits"], config["user"])
    if config["user"] is not None:
        become(config["user"])
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    if config["landlock"]:
        restrict_files(config["readable"], config["listed"], config["landlock"])
    if config["filter"]:
        install_filter(bytes.fromhex(config["filter"]))


def start(config: dict[str, Any], status: int) -> int:
    """Forks the program; a failure before it runs is reported and ends with status 0."""
    pid = os.fork()
    if pid:
        return pid
    try:
        confine(config)
        os.execve(config["argv"][0], config["argv"], {})
    except BaseException as error:
        os.write(status, (json.dumps({"failure": f"{type(error).__name__}: {error}"}) + "\n").encode())
    os._exit(0)


def descendants() -> list[int]:
    found, waiting = [], [os.getpid()]
    while waiting:
        directory = f"/proc/{waiting.pop()}/task"
        try:
            for task in os.listdir(directory):
                with open(f"{directory}/{task}/children") as file:
                    children = [int(word) for word in file.read().split()]
                found += children
                waiting += children
        except OSError:  # gone meanwhile
            continue
    return found


def kill_all(user: int | None) -> None:
    """Ends every descendant; orphans come back to this process, so it knows when none is left."""
    while True:
        if user is not None:
            kill_user(user)
        for pid in descendants():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        select.select([], [], [], 0.001)


def kill_user(user: int) -> None:
    """One signal to all processes of the box's user at the same moment: no fork escapes it."""
    killer = os.fork()
    if killer:
        os.waitpid(killer, 0)
        return
    try:
        os.setresuid(user, user, user)
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass
    finally:
        os._exit(0)


def main() -> None:
    config_descriptor, status, leash = (int(word) for word in sys.argv[1:])
    for descriptor in (config_descriptor, status, leash):
        os.set_inheritable(descriptor, False)
    with open(config_descriptor) as file:
        config = json.load(file)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    pid = start(config, status)
    program = os.pidfd_open(pid)
    ready, _, _ = select.select([program, leash], [], [])
    report = {}
    if program in ready:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        report = {"exit-code": 128 - code if code < 0 else code}
    kill_all(config["user"])
    os.write(status, (json.dumps(report) + "\n").encode())


if __name__ == "__main__":
    main()
