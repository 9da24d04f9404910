# A 32-bit process, which gms must refuse: prints "ready", then pauses until a signal ends it.
    .globl _start
_start:
    mov $4, %eax            # write(1, ready, 6)
    mov $1, %ebx
    mov $ready, %ecx
    mov $6, %edx
    int $0x80
    mov $29, %eax           # pause()
    int $0x80
    jmp _start
ready:
    .ascii "ready\n"
    .section .note.GNU-stack,"",@progbits
