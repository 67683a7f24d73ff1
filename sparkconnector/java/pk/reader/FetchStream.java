// A fetch stream to the leader of a partition, over a plain socket (src/pk/wire/socket_network.py).
//
// A frame is `u32 length | u32 head length | head | payload`.  The stream is the task's own and is closed
// with its section.  The broker sends no more than it was granted, so what waits is bounded by the
// credit in the plan; the JVM holds one frame.
//
// Local invariants
//   N1  A broker that sends nothing for SILENCE_MS is left to Python.  A task that was cancelled ends within
//       POLL_MS.
//   N2  Memory grows with the bytes that arrived, not with the length that a frame announces.
package pk.reader;

import java.io.Closeable;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.net.SocketTimeoutException;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import org.apache.spark.TaskContext;

final class FetchStream implements Closeable {
  private static final int SILENCE_MS = 3_000;
  private static final int POLL_MS = 200;
  private static final int FIRST_BYTES = 8 << 20;
  private static final byte[] OPENING = "PKS1F".getBytes(StandardCharsets.US_ASCII);

  private final Socket socket = new Socket();
  private final InputStream in;
  private final OutputStream out;
  private final long frameBytesMost;
  private final byte[] four = new byte[4];

  /** The last frame: its bytes, where its head begins and where its payload begins. */
  byte[] frame = new byte[0];
  int headAt;
  int payloadAt;

  FetchStream(String host, int port, long frameBytesMost) throws IOException {
    this.frameBytesMost = frameBytesMost;
    try {
      socket.setTcpNoDelay(true);
      socket.setKeepAlive(true);
      socket.connect(new InetSocketAddress(host, port), SILENCE_MS);
      socket.setSoTimeout(POLL_MS);
      in = socket.getInputStream();
      out = socket.getOutputStream();
      out.write(OPENING);
      fill(four, 0, 4);
      if (!Arrays.equals(four, Arrays.copyOf(OPENING, 4))) {
        throw new IOException(host + ":" + port + " does not speak pk's protocol");
      }
    } catch (IOException | RuntimeException cause) {
      close();
      throw cause;
    }
  }

  /** Sends a frame that Python encoded, without the length in front. */
  void send(byte[] encoded) throws IOException {
    byte[] whole = new byte[4 + encoded.length];
    BatchHeader.INT.set(whole, 0, encoded.length);
    System.arraycopy(encoded, 0, whole, 4, encoded.length);
    out.write(whole);
  }

  void grant(long credit) throws IOException {
    out.write(FetchReply.grant(credit));
  }

  /** Receives a frame into a new array: columns may still point into the one before. */
  void receive() throws IOException {
    fill(four, 0, 4);
    long size = (int) BatchHeader.INT.get(four, 0) & 0xffffffffL;
    if (size < 4 || size > frameBytesMost) {
      throw new IOException("a frame of " + size + " bytes"); // 2^32 - 1 is the peer's end
    }
    byte[] found = new byte[(int) Math.min(size, FIRST_BYTES)];
    int filled = 0;
    while (true) {
      fill(found, filled, found.length);
      filled = found.length;
      if (filled == size) {
        break;
      }
      found = Arrays.copyOf(found, (int) Math.min(size, 2L * filled)); // N2
    }
    long head = (int) BatchHeader.INT.get(found, 0) & 0xffffffffL;
    if (head > size - 4) {
      throw new IOException("a frame of " + size + " bytes announces a head of " + head);
    }
    frame = found;
    headAt = 4;
    payloadAt = 4 + (int) head;
  }

  private void fill(byte[] into, int start, int end) throws IOException {
    int at = start;
    long deadline = System.nanoTime() + SILENCE_MS * 1_000_000L;
    while (at < end) {
      int got;
      try {
        got = in.read(into, at, end - at);
      } catch (SocketTimeoutException cause) {
        TaskContext task = TaskContext.get();
        boolean cancelled = task != null && task.isInterrupted();
        if (cancelled || System.nanoTime() > deadline) { // N1
          throw cause;
        }
        continue;
      }
      if (got < 0) {
        throw new IOException("the broker closed the stream");
      }
      at += got;
      deadline = System.nanoTime() + SILENCE_MS * 1_000_000L;
    }
  }

  @Override
  public void close() throws IOException {
    socket.close();
  }
}
