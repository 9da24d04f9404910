//! x86-64: the injected blob and the registers of a stopped thread.
//!
//! The blob is position-independent, uses no stack and calls nothing. It has two parts:
//! * the *stub*, a `syscall` instruction which stopped threads are pointed at; only a child of an injected `clone` ever runs
//!   past it, into the *intermediate*, which clones the *evictor*, waits until that is ready and exits; or, if the evictor is to stay
//!   a child of the process ([`DIRECT`]), into the evictor itself;
//! * the *evictor*: gives itself an empty descriptor table, makes a socket pair and then serves lists of system calls that arrive on it.
//!   When the other end is gone it executes its *will*, a list prepared in advance, and exits. Until the pager has taken its end, this
//!   process holds both, and would never see the end of the pager: so its first wait is bounded ([`PATIENCE_S`]).

use std::arch::global_asm;

/// Registers as `PTRACE_GETREGS` gives them.
pub(crate) type Registers = libc::user_regs_struct;

/// Distance of the data area from the code page.
pub(crate) const DATA: u64 = 0x1000;
/// `i32`: 1 once the evictor can be talked to; a negative errno if it could not be started.
pub(crate) const READY: u64 = DATA;
/// `u32`: process id of the evictor in the namespace of the workload.
pub(crate) const EVICTOR_PID: u64 = DATA + 4;
/// `u32`: 1 if the evictor is to stay a child of the process.
pub(crate) const DIRECT: u64 = DATA + 8;
/// A random number, by which an evictor that was never connected is known to run in this memory.
pub(crate) const SECRET: u64 = DATA + 0xA8;
/// `u64`: where the kernel clears the id of the thread that was stopped, when that ends.
pub(crate) const TID_ADDRESS: u64 = DATA + 0x18;
/// Received messages: a call list.
pub(crate) const BUFFER: u64 = 0x2000;
/// Bytes of [`BUFFER`].
pub(crate) const BUFFER_LEN: usize = 0x8000;
/// The call list executed when the pager is gone.
pub(crate) const WILL: u64 = 0xA000;
/// Bytes of [`WILL`].
pub(crate) const WILL_LEN: usize = 0x1000;
/// Bytes of the whole mapping.
pub(crate) const BLOB_LEN: usize = 0xB000;

/// Seconds that an evictor waits to be connected to.
pub(crate) const PATIENCE_S: u64 = 5;

/// Code segment of 64-bit user code: anything else is a 32-bit process.
const USER64_CS: u64 = 0x33;

global_asm!(
    ".pushsection .rodata.gms_blob, \"a\"",
    ".balign 16",
    "gms_blob_start:",
    // ---- stub: offset 0. The traced thread never executes what follows the syscall; a cloned child does.
    "syscall",
    // ---- intermediate: clone(CLONE_VM|CLONE_FILES|CLONE_PARENT_SETTID, stack, &pid)
    "lea rbx, [rip + gms_blob_start]",
    "cmp dword ptr [rbx + 0x1008], 0",
    "jne 20f",
    "mov eax, 56",
    "mov edi, 0x100500",
    "lea rsi, [rbx + 0xB000]",
    "lea rdx, [rbx + 0x1004]",
    "xor r10d, r10d",
    "xor r8d, r8d",
    "syscall",
    "test rax, rax",
    "jz 20f",
    "js 17f",
    "mov r12d, 200", // bounded: 200 waits of 10 ms
    "18:",
    "cmp dword ptr [rbx + 0x1000], 0",
    "jne 19f",
    "mov eax, 202", // futex(&ready, FUTEX_WAIT_PRIVATE, 0, &10ms)
    "lea rdi, [rbx + 0x1000]",
    "mov esi, 128",
    "xor edx, edx",
    "lea r10, [rbx + 0x1020]",
    "syscall",
    "dec r12d",
    "jnz 18b",
    "jmp 19f",
    "17:", // it failed: tells why
    "mov dword ptr [rbx + 0x1000], eax",
    "mov eax, 202", // futex(&ready, FUTEX_WAKE_PRIVATE, 1)
    "lea rdi, [rbx + 0x1000]",
    "mov esi, 129",
    "mov edx, 1",
    "syscall",
    "19:",
    "mov eax, 231", // exit_group(0)
    "xor edi, edi",
    "syscall",
    "ud2",
    // ---- evictor
    "20:",
    "mov eax, 436", // close_range(0, ~0, CLOSE_RANGE_UNSHARE)
    "xor edi, edi",
    "mov esi, -1",
    "mov edx, 2",
    "syscall",
    "test rax, rax",
    "jnz 17b",
    "mov eax, 112", // setsid()
    "syscall",
    "mov eax, 80", // chdir("/"): or it would keep a file system from being unmounted, as any process's directory does
    "lea rdi, [rbx + 0x10A0]",
    "syscall",
    "mov eax, 157", // prctl(PR_SET_NAME, "far-evictor")
    "mov edi, 15",
    "lea rsi, [rbx + 0x1030]",
    "syscall",
    "mov eax, 53", // socketpair(AF_UNIX, SOCK_SEQPACKET|SOCK_CLOEXEC, 0, fds)
    "mov edi, 1",
    "mov esi, 0x80005",
    "xor edx, edx",
    "lea r10, [rbx + 0x1010]",
    "syscall",
    "test rax, rax",
    "jnz 17b",
    "mov eax, 54", // setsockopt(0, SOL_SOCKET, SO_RCVTIMEO, &timeval, 16)
    "xor edi, edi",
    "mov esi, 1",
    "mov edx, 20",
    "lea r10, [rbx + 0x1090]",
    "mov r8d, 16",
    "syscall",
    "test rax, rax",
    "jnz 17b",
    "mov dword ptr [rbx + 0x1000], 1",
    "mov eax, 202", // futex(&ready, FUTEX_WAKE_PRIVATE, 1)
    "lea rdi, [rbx + 0x1000]",
    "mov esi, 129",
    "mov edx, 1",
    "syscall",
    "21:",                               // serve: recvmsg(0, &msghdr, MSG_CMSG_CLOEXEC)
    "mov qword ptr [rbx + 0x1068], 128", // msg_controllen
    "mov eax, 47",
    "xor edi, edi",
    "lea rsi, [rbx + 0x1040]",
    "mov edx, 0x40000000",
    "syscall",
    "cmp rax, -4",
    "je 21b",
    "cmp rax, 8",
    "jl 30f",
    "mov r12, rax", // length of the message: the reply has the same
    "lea r15, [rbx + 0x2000]",
    "mov r13d, 0",
    "jmp 40f",
    "22:", // reply: sendto(0, buffer, length, MSG_NOSIGNAL)
    "mov eax, 44",
    "xor edi, edi",
    "lea rsi, [rbx + 0x2000]",
    "mov rdx, r12",
    "mov r10d, 0x4000",
    "xor r8d, r8d",
    "xor r9d, r9d",
    "syscall",
    "cmp rax, -4",
    "je 22b",
    "test rax, rax",
    "jns 21b",
    "30:", // the pager is gone, or never came: the will, which is empty then
    "lea r15, [rbx + 0xA000]",
    "mov r13d, 1",
    "jmp 40f",
    "40:", // execute the list at r15: count, then {nr, a0..a5, result}
    "mov r14, [r15]",
    "add r15, 8",
    "cmp r14, 511",
    "ja 44f",
    "41:",
    "test r14, r14",
    "jz 43f",
    "mov rax, [r15]",
    "mov rdi, [r15 + 8]",
    "mov rsi, [r15 + 16]",
    "mov rdx, [r15 + 24]",
    "mov r10, [r15 + 32]",
    "mov r8, [r15 + 40]",
    "mov r9, [r15 + 48]",
    "syscall",
    "mov [r15 + 56], rax",
    "add r15, 64",
    "dec r14",
    "jmp 41b",
    "43:",
    "test r13d, r13d",
    "jz 22b",
    "44:",
    "mov eax, 231",
    "xor edi, edi",
    "syscall",
    "ud2",
    "gms_blob_end:",
    ".popsection",
);

unsafe extern "C" {
    static gms_blob_start: u8;
    static gms_blob_end: u8;
}

/// The whole image to be written at the base of the mapping: code page and initial data page.
pub(crate) fn blob_image(base: u64, direct: bool) -> Vec<u8> {
    // SAFETY: both symbols delimit one object emitted by the `global_asm!` above, read-only for the life of the program.
    let code = unsafe {
        let start = &raw const gms_blob_start;
        let end = &raw const gms_blob_end;
        std::slice::from_raw_parts(start, end.offset_from_unsigned(start))
    };
    let mut image = vec![0u8; (DATA + 0x1000) as usize];
    image[..code.len()].copy_from_slice(code);
    let mut put = |offset: u64, value: u64| {
        image[offset as usize..offset as usize + 8].copy_from_slice(&value.to_le_bytes());
    };
    put(DIRECT, direct.into());
    put(0x1020, 0); // timespec of the intermediate's wait: 10 ms
    put(0x1028, 10_000_000);
    put(0x1030, u64::from_le_bytes(*b"far-evic"));
    put(0x1038, u64::from_le_bytes(*b"tor\0\0\0\0\0"));
    // msghdr at 0x1040: name, namelen, iov, iovlen, control, controllen, flags
    put(0x1050, base + 0x1080);
    put(0x1058, 1);
    put(0x1060, base + 0x1100);
    put(0x1068, 128);
    // iovec at 0x1080
    put(0x1080, base + BUFFER);
    put(0x1088, BUFFER_LEN as u64);
    // timeval at 0x1090
    put(0x1090, PATIENCE_S);
    put(0x10A0, b'/'.into());
    image
}

/// Bytes of the instruction that enters the kernel.
pub(crate) const SYSCALL_INSTRUCTION: [u8; 2] = [0x0f, 0x05];

/// Whether the thread runs 64-bit code.
pub(crate) fn is_native(registers: &Registers) -> bool {
    registers.cs == USER64_CS
}

/// Points a stopped thread at the syscall instruction at `instruction` with these arguments.
pub(crate) fn prepare_syscall(
    saved: &Registers,
    instruction: u64,
    nr: i64,
    args: [u64; 6],
) -> Registers {
    let mut registers = *saved;
    registers.rip = instruction;
    registers.rax = nr as u64;
    registers.orig_rax = u64::MAX; // no restart of whatever was interrupted
    registers.rdi = args[0];
    registers.rsi = args[1];
    registers.rdx = args[2];
    registers.r10 = args[3];
    registers.r8 = args[4];
    registers.r9 = args[5];
    registers
}

/// Result of the system call that the thread has just left.
pub(crate) fn syscall_result(registers: &Registers) -> i64 {
    registers.rax as i64
}

/// Program counter.
pub(crate) fn instruction_pointer(registers: &Registers) -> u64 {
    registers.rip
}

/// Sets the program counter.
pub(crate) fn set_instruction_pointer(registers: &mut Registers, ip: u64) {
    registers.rip = ip;
}

/// Sends a thread that a signal has interrupted past the system call that it is about to begin, or to begin anew, if it is `call` with this first
/// argument: it fails with EINTR.
pub(crate) fn skip_call(context: &mut libc::ucontext_t, call: i64, argument: i64) {
    let registers = &mut context.uc_mcontext.gregs;
    let [ip, result, first] = [libc::REG_RIP, libc::REG_RAX, libc::REG_RDI].map(|r| r as usize);
    // SAFETY: the instruction which the thread executes next; one that follows lies on its page or is never read of.
    let next = unsafe { std::slice::from_raw_parts(registers[ip] as *const u8, 2) };
    if registers[result] == call && registers[first] == argument && next == SYSCALL_INSTRUCTION {
        registers[ip] += SYSCALL_INSTRUCTION.len() as i64;
        registers[result] = -i64::from(libc::EINTR);
    }
}

/// What a call returns inside the kernel that is begun anew unless a handler of a signal is run, with which it fails: include/linux/errno.h.
const ERESTARTNOHAND: i64 = 514;

/// Some system calls return EINTR when a stop interrupts them, although no signal arrived (epoll_wait, receives with a time-out,
/// sigtimedwait, semtimedop ... see signal(7)). The workload must not see that: at a stop on the way out of the kernel the result is changed so that the
/// kernel begins the call anew, if it has no handler to run.
pub(crate) fn restart_interrupted(registers: &mut Registers) -> bool {
    let interrupted = registers.rax as i64 == -i64::from(libc::EINTR);
    let restartable = matches!(
        registers.orig_rax as i64,
        libc::SYS_epoll_wait
            | libc::SYS_epoll_pwait
            | libc::SYS_epoll_pwait2
            | libc::SYS_recvfrom
            | libc::SYS_recvmsg
            | libc::SYS_recvmmsg
            | libc::SYS_sendto
            | libc::SYS_sendmsg
            | libc::SYS_sendmmsg
            | libc::SYS_accept
            | libc::SYS_accept4
            | libc::SYS_connect
            | libc::SYS_read
            | libc::SYS_readv
            | libc::SYS_write
            | libc::SYS_writev
            | libc::SYS_rt_sigtimedwait
            | libc::SYS_semop
            | libc::SYS_semtimedop
            | libc::SYS_msgrcv
            | libc::SYS_msgsnd
            | libc::SYS_io_getevents
            | libc::SYS_futex
            | libc::SYS_io_uring_enter
    );
    if interrupted && restartable {
        registers.rax = -ERESTARTNOHAND as u64;
    }
    interrupted && restartable
}

/// Keeps a thread that stands at the beginning of a system call from issuing it.
pub(crate) fn skip_syscall(registers: &mut Registers) {
    registers.orig_rax = u64::MAX;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blob_fits_its_page_and_starts_with_a_syscall() {
        let image = blob_image(0x7000_0000_0000, false);
        assert_eq!(image[..2], SYSCALL_INSTRUCTION);
        assert!(
            image[DATA as usize - 64..DATA as usize].iter().all(|&b| b == 0),
            "code reaches the data page"
        );
    }

    #[test]
    fn an_interrupted_epoll_wait_is_for_the_kernel_to_begin_anew() {
        // SAFETY: all-zero is a valid value of a struct of integers.
        let mut registers: Registers = unsafe { std::mem::zeroed() };
        registers.rip = 0x1002;
        registers.rax = -i64::from(libc::EINTR) as u64;
        registers.orig_rax = libc::SYS_epoll_wait as u64;
        assert!(restart_interrupted(&mut registers));
        assert_eq!((registers.rip, registers.rax as i64), (0x1002, -514));
        registers.rax = 5;
        assert!(!restart_interrupted(&mut registers));
    }
}
