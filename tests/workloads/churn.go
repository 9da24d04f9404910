// churn MIB: goroutines build and drop linked structures under a tight GC target, then every survivor is verified.
// Built with CGO_ENABLED=0: no libc, its own threads and stacks, signals for preemption.
package main

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
)

const (
	workers  = 4
	leafSize = 1024
	rounds   = 3
)

type node struct {
	next *node
	id   uint64
	data [leafSize / 8]uint64
}

func mix(x uint64) uint64 {
	x += 0x9E3779B97F4A7C15
	x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
	x = (x ^ (x >> 27)) * 0x94D049BB133111EB
	return x ^ (x >> 31)
}

func build(id uint64, next *node) *node {
	n := &node{next: next, id: id}
	for i := range n.data {
		n.data[i] = mix(id) + uint64(i)
	}
	return n
}

// verify walks a list and returns its length and digest, or ends the program at the first wrong word.
func verify(worker int, list *node) (count int, digest uint64) {
	for n := list; n != nil; n = n.next {
		for i, word := range n.data {
			if word != mix(n.id)+uint64(i) {
				fmt.Fprintf(os.Stderr, "MISMATCH worker %d node %d word %d: %x\n", worker, n.id, i, word)
				os.Exit(1)
			}
		}
		digest = mix(digest ^ n.id)
		count++
	}
	return count, digest
}

func main() {
	mib := 64
	if len(os.Args) > 1 {
		mib, _ = strconv.Atoi(os.Args[1])
	}
	debug.SetGCPercent(50)
	perWorker := mib << 20 / leafSize / workers
	digests := make([]uint64, workers)
	index := make(map[uint64]int)
	var lock sync.Mutex
	var group sync.WaitGroup
	for w := 0; w < workers; w++ {
		group.Add(1)
		go func(w int) {
			defer group.Done()
			var list *node
			for round := 0; round < rounds; round++ {
				list = nil
				for i := 0; i < perWorker; i++ {
					id := uint64(w)<<48 | uint64(round)<<40 | uint64(i)
					list = build(id, list)
					if i%64 == 0 {
						lock.Lock()
						index[id] = i
						lock.Unlock()
					}
				}
				count, digest := verify(w, list)
				if count != perWorker {
					fmt.Fprintf(os.Stderr, "MISMATCH worker %d: %d nodes of %d\n", w, count, perWorker)
					os.Exit(1)
				}
				digests[w] = mix(digests[w] ^ digest)
			}
			runtime.KeepAlive(list)
		}(w)
	}
	group.Wait()
	for id, i := range index {
		if id&0xFFFFFFFFFF != uint64(i) {
			fmt.Fprintf(os.Stderr, "MISMATCH in the index: %x -> %d\n", id, i)
			os.Exit(1)
		}
	}
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	fmt.Fprintf(os.Stderr, "%d collections, heap %d MiB\n", stats.NumGC, stats.HeapSys>>20)
	fmt.Printf("churn ok %d entries digest %x\n", len(index), digests)
}
