// LZ4 frames.  The decoder of lz4-java refuses frames whose blocks refer to each other, and Arrow's do.
//
// Local invariant
//   Z1  Every length and distance is compared with the bytes that are there before it is used; the output
//       has exactly the announced size.  The batch's checksum was verified before, so the frame's own
//       checksums are skipped.
package pk.reader;

import java.io.IOException;

final class Lz4 {
  private static final int MAGIC = 0x184D2204;
  private static final int BLOCK_CHECKSUM = 0x10;
  private static final int CONTENT_SIZE = 0x08;
  private static final int CONTENT_CHECKSUM = 0x04;
  private static final int DICTIONARY = 0x01;
  private static final int MATCH_LEAST = 4;

  private final byte[] in;
  private final int end;
  private final byte[] out;
  private int at;
  private int filled;

  private Lz4(byte[] in, int start, int end, int size) {
    this.in = in;
    this.at = start;
    this.end = end;
    this.out = new byte[size];
  }

  /** Decodes the frame in `in[start, end)`, which decodes to exactly `size` bytes. */
  static byte[] decode(byte[] in, int start, int end, int size) throws IOException {
    Lz4 one = new Lz4(in, start, end, size);
    one.frame();
    if (one.filled != size) {
      throw new IOException("lz4: " + one.filled + " bytes, " + size + " were announced");
    }
    return one.out;
  }

  private void frame() throws IOException {
    if (number() != MAGIC) {
      throw new IOException("not an lz4 frame");
    }
    int flags = next();
    next(); // the largest block: the output's size bounds it
    if (flags >> 6 != 1 || (flags & DICTIONARY) != 0) {
      throw new IOException("lz4: flags " + flags);
    }
    skip((flags & CONTENT_SIZE) != 0 ? 8 : 0);
    skip(1);
    for (int size = number(); size != 0; size = number()) {
      int length = size & 0x7fffffff;
      if (length > end - at) {
        throw new IOException("lz4: a block ends behind the frame");
      }
      if (size < 0) {
        literals(length);
      } else {
        block(at + length);
      }
      skip((flags & BLOCK_CHECKSUM) != 0 ? 4 : 0);
    }
    skip((flags & CONTENT_CHECKSUM) != 0 ? 4 : 0);
    if (at != end) {
      throw new IOException("lz4: bytes behind the frame");
    }
  }

  private void block(int stop) throws IOException {
    while (at < stop) {
      int token = in[at++] & 0xff;
      literals(length(token >> 4, stop), stop);
      if (at == stop) {
        return; // the last sequence of a block has no match
      }
      if (stop - at < 2) {
        throw new IOException("lz4: a block is cut off");
      }
      int distance = (in[at] & 0xff) | (in[at + 1] & 0xff) << 8;
      at += 2;
      match(distance, length(token & 15, stop) + MATCH_LEAST);
    }
  }

  private int length(int first, int stop) throws IOException {
    int found = first;
    if (first == 15) {
      int more;
      do {
        if (at >= stop || found > out.length) {
          throw new IOException("lz4: a length beyond the block");
        }
        more = in[at++] & 0xff;
        found += more;
      } while (more == 255);
    }
    return found;
  }

  private void literals(int size, int stop) throws IOException {
    if (size > stop - at) {
      throw new IOException("lz4: literals beyond the block");
    }
    literals(size);
  }

  private void literals(int size) throws IOException {
    if (size > out.length - filled) {
      throw new IOException("lz4: more bytes than announced");
    }
    System.arraycopy(in, at, out, filled, size);
    at += size;
    filled += size;
  }

  private void match(int distance, int size) throws IOException {
    if (distance == 0 || distance > filled || size > out.length - filled) {
      throw new IOException("lz4: a match outside the output");
    }
    int from = filled - distance;
    if (distance >= size) {
      System.arraycopy(out, from, out, filled, size);
    } else {
      for (int n = 0; n < size; n++) {
        out[filled + n] = out[from + n];
      }
    }
    filled += size;
  }

  private int next() throws IOException {
    if (at >= end) {
      throw new IOException("lz4: the frame is cut off");
    }
    return in[at++] & 0xff;
  }

  private int number() throws IOException {
    return next() | next() << 8 | next() << 16 | next() << 24;
  }

  private void skip(int size) throws IOException {
    if (size > end - at) {
      throw new IOException("lz4: the frame is cut off");
    }
    at += size;
  }
}
