// The heads of frames: a reader of the few protobuf fields that a scan needs, and the one message that it
// writes (proto/pk.proto).  Fields that it does not need are skipped.
//
// Local invariant
//   E1  Every length is compared with the bytes that are left.  A reply that says an error, another message,
//       or a field of another type than expected is an exception: Python asks again and understands it.
package pk.reader;

import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.util.ArrayList;
import java.util.List;

final class FetchReply {
  private static final int ERROR = 2;
  private static final int HELLO_REPLY = 11;
  private static final int FETCH = 42;
  private static final int FETCH_REPLY = 43;
  /** The messages of a head have numbers from here on; its other fields have smaller ones. */
  private static final int FIRST_MESSAGE = 10;

  /** What a reply says about one position. */
  static final class Part {
    long positionId;
    long nextOffset;
    long payloadBytes;
    boolean dense;
    /** Producer id, first and last offset of each aborted transaction. */
    final List<long[]> aborted = new ArrayList<>();
  }

  final List<Part> parts = new ArrayList<>();

  /** Parses the head of a frame that answers a fetch. */
  FetchReply(byte[] bytes, int start, int end) throws IOException {
    Fields head = new Fields(bytes, start, end);
    while (head.next()) {
      if (head.number == ERROR) {
        throw new IOException("the broker answered an error");
      }
      if (head.number >= FIRST_MESSAGE && head.number != FETCH_REPLY) {
        throw new IOException("the broker answered message " + head.number);
      }
      if (head.number == FETCH_REPLY) {
        Fields reply = head.nested();
        while (reply.next()) {
          if (reply.number == 1) {
            parts.add(part(reply.nested()));
          }
        }
      }
    }
  }

  private static Part part(Fields one) throws IOException {
    Part found = new Part();
    while (one.next()) {
      switch (one.number) {
        case 3:
          found.positionId = one.asNumber();
          break;
        case 4:
        case 10:
          throw new IOException("the broker refused the position");
        case 9:
          found.nextOffset = one.asNumber();
          break;
        case 12:
          found.aborted.add(aborted(one.nested()));
          break;
        case 13:
          found.payloadBytes = one.asNumber();
          break;
        case 20:
          found.dense = one.asNumber() != 0;
          break;
        default:
      }
    }
    return found;
  }

  private static long[] aborted(Fields one) throws IOException {
    long[] found = new long[3];
    while (one.next()) {
      if (one.number >= 1 && one.number <= 3) {
        found[one.number - 1] = one.asNumber();
      }
    }
    return found;
  }

  /** Returns the protocol number of a hello's answer. */
  static long protocolOf(byte[] bytes, int start, int end) throws IOException {
    Fields head = new Fields(bytes, start, end);
    while (head.next()) {
      if (head.number == HELLO_REPLY) {
        Fields reply = head.nested();
        while (reply.next()) {
          if (reply.number == 4) {
            return reply.asNumber();
          }
        }
      }
    }
    throw new IOException("the broker did not answer the hello");
  }

  /** Returns a frame, with its length in front, that grants credit. */
  static byte[] grant(long credit) {
    ByteArrayOutputStream request = new ByteArrayOutputStream();
    request.write(8 << 3); // credit_bytes
    varint(request, credit);
    ByteArrayOutputStream head = new ByteArrayOutputStream();
    varint(head, FETCH << 3 | 2);
    varint(head, request.size());
    head.writeBytes(request.toByteArray());
    ByteArrayOutputStream frame = new ByteArrayOutputStream();
    little(frame, head.size() + 4);
    little(frame, head.size());
    frame.writeBytes(head.toByteArray());
    return frame.toByteArray();
  }

  static void little(ByteArrayOutputStream out, int number) {
    for (int shift = 0; shift < 32; shift += 8) {
      out.write(number >>> shift);
    }
  }

  private static void varint(ByteArrayOutputStream out, long number) {
    long rest = number;
    while ((rest & ~0x7fL) != 0) {
      out.write((int) (rest & 0x7f | 0x80));
      rest >>>= 7;
    }
    out.write((int) rest);
  }

  /** The fields of one message, one after the other. */
  private static final class Fields {
    private final byte[] bytes;
    private final int end;
    private int at;
    int number;
    private int type;
    /** A number; for a nested message, where it begins. */
    private long value;
    private int nestedEnd;

    Fields(byte[] bytes, int start, int end) {
      this.bytes = bytes;
      this.at = start;
      this.end = end;
    }

    boolean next() throws IOException {
      if (at == end) {
        return false;
      }
      long tag = varint();
      number = (int) (tag >>> 3);
      type = (int) (tag & 7);
      nestedEnd = -1;
      if (tag >>> 32 != 0 || number == 0) {
        throw new IOException("the head of a frame does not parse");
      }
      switch (type) {
        case 0:
          value = varint();
          return true;
        case 1:
          skip(8);
          return true;
        case 5:
          skip(4);
          return true;
        case 2:
          long size = varint();
          value = at;
          skip(size);
          nestedEnd = at;
          return true;
        default:
          throw new IOException("the head of a frame does not parse");
      }
    }

    /** Returns the value of a field that is a number. */
    long asNumber() throws IOException {
      if (type != 0) {
        throw new IOException("the head of a frame does not parse");
      }
      return value;
    }

    Fields nested() throws IOException {
      if (nestedEnd < 0) {
        throw new IOException("the head of a frame does not parse");
      }
      return new Fields(bytes, (int) value, nestedEnd);
    }

    private void skip(long size) throws IOException {
      if (size < 0 || size > end - at) {
        throw new IOException("the head of a frame is cut off");
      }
      at += (int) size;
    }

    private long varint() throws IOException {
      long found = 0;
      for (int shift = 0; shift < 64; shift += 7) {
        if (at == end) {
          break;
        }
        byte each = bytes[at++];
        found |= (each & 0x7fL) << shift;
        if (each >= 0) {
          return found;
        }
      }
      throw new IOException("the head of a frame does not parse");
    }
  }
}
