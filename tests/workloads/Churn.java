import java.util.HashMap;
import java.util.Map;

/** Churn MIB: objects are made, dropped and promoted until the heap has turned over several times; all survivors are verified. */
public final class Churn {
    private static final int BLOCK = 2048;
    private static final int ROUNDS = 3;

    private static long mix(long x) {
        x += 0x9E3779B97F4A7C15L;
        x = (x ^ (x >>> 30)) * 0xBF58476D1CE4E5B9L;
        x = (x ^ (x >>> 27)) * 0x94D049BB133111EBL;
        return x ^ (x >>> 31);
    }

    private static long[] block(long id) {
        long[] words = new long[BLOCK / 8];
        for (int i = 0; i < words.length; i++) words[i] = mix(id) + i;
        return words;
    }

    private static void verify(long id, long[] words) {
        for (int i = 0; i < words.length; i++) {
            if (words[i] != mix(id) + i) {
                System.err.println("MISMATCH block " + id + " word " + i + ": " + words[i]);
                System.exit(1);
            }
        }
    }

    public static void main(String[] args) throws InterruptedException {
        int blocks = Integer.parseInt(args[0]) * (1 << 20) / BLOCK;
        Map<Long, long[]> live = new HashMap<>();
        for (long i = 0; i < blocks; i++) live.put(i, block(i));
        long next = blocks;
        for (int round = 0; round < ROUNDS; round++) {
            for (long i = round; i < next; i += ROUNDS) {
                if (live.remove(i) != null) live.put(next, block(next++));
                if (next > (long) blocks * (round + 2)) break;
            }
            Thread[] readers = new Thread[2];
            for (int t = 0; t < readers.length; t++) {
                final int mine = t;
                readers[t] = new Thread(() -> live.forEach((id, words) -> {
                    if (id % 2 == mine) verify(id, words);
                }));
                readers[t].start();
            }
            for (Thread reader : readers) reader.join();
        }
        long digest = 0;
        for (long i = 0; i < next; i++) {
            long[] words = live.get(i);
            if (words == null) continue;
            verify(i, words);
            digest = mix(digest ^ i ^ words[(int) (i % words.length)]);
        }
        System.out.println("Churn ok " + live.size() + " blocks digest " + Long.toHexString(digest));
    }
}
